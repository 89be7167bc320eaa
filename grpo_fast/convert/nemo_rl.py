"""NeMo-RL: the YAML of a GRPO or DPO run, in its sections (`grpo:`, `loss_fn:`, ...) or one `algorithm:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.absent import Absent
from grpo_fast.convert.conversion import Entry, ForeignConfig
from grpo_fast.convert.names import MOVED, NAMES, Places, Rule, Translate, mapped, refused, translate, when
from grpo_fast.convert.references import flatten, resolve
from grpo_fast.convert.trl import PREFERENCE

Leaves = Mapping[str, Any]


def read_nemo_rl(document: Mapping[str, Any]) -> ForeignConfig:
    """Every leaf is an entry, references resolved."""
    leaves = resolve(flatten(document))
    name = leaves.get("algorithm.name", leaves.get("algorithm", "dpo" if "dpo" in document else "grpo"))
    preference = name == "dpo"
    flat_names = NAMES | (PREFERENCE if preference else {})
    siblings, entries = dict(leaves), []
    for key, value in leaves.items():
        known = key
        if key.startswith("algorithm.") and key != "algorithm.name":  # the form of one section
            leaf = key.removeprefix("algorithm.")
            sections = ("dpo",) if preference else ("grpo", "loss_fn")
            known = next((name for s in sections if (name := f"{s}.{leaf}") in RULES), leaf)
            siblings[known] = value
        rule: Rule | None = RULES.get(known) or _reason(known)
        if known != key and known not in RULES:
            rule = flat_names.get(known)
        if isinstance(value, str) and "${" in value:
            rule = Absent("refers to something outside this file; set it by hand")
        entries.append(Entry(key, value, rule))
    # What the loss is, is told by several keys of its section.
    entries.sort(key=lambda entry: not entry.key.startswith("loss_fn."))
    return ForeignConfig("NeMo-RL", preference, entries, siblings)


def _reason(key: str) -> Absent | None:
    """Why a key has no place here, by the longest prefix; none where nothing is known of it."""
    # A prefix ends at a dot, or inside a name where it stands for several: `grpo.val` is `grpo.val_period`.
    fitting = [p for p in REASONS if key.startswith(p) and ("." in p or key[len(p) :][:1] in ("", "."))]
    return Absent(REASONS[max(fitting, key=len)]) if fitting else None


def loss_type(value: Any, leaves: Leaves) -> Places:
    if leaves.get("loss_fn.use_cispo"):
        return {"loss.loss_type": "cispo"}
    if leaves.get("loss_fn.disable_ppo_ratio"):
        raise ValueError("REINFORCE's normalisation differs; choose loss.loss_type gpg, rloo or reinforce")
    return {"loss.loss_type": "dapo" if value else "grpo"}


def max_steps(value: Any, _: Leaves) -> Places:
    if value >= 1_000_000:
        raise ValueError("it stands for no limit; set max_steps (epochs x questions / prompts_per_step)")
    return {"max_steps": value}


def sampler_correction(value: Any, leaves: Leaves) -> Places:
    if not value:
        return {"loss.sampler_correction": "none"}
    bounded = leaves.get("loss_fn.truncated_importance_sampling_ratio")
    kind = leaves.get("loss_fn.truncated_importance_sampling_type") or ("tis" if bounded else None)
    otherwise = "a correction without bounds, or by sequence and token at once, is not offered"
    modes = {"tis": "token_truncate", "icepop": "token_mask"}
    return mapped("loss.sampler_correction", modes, otherwise)(kind, {})


def minibatches(value: Any, leaves: Leaves) -> Places:
    if any(key.startswith("dpo.") for key in leaves):
        return {"prompts_per_step": value}
    prompts, group = leaves.get("grpo.num_prompts_per_step"), leaves.get("grpo.num_generations_per_prompt")
    if not (prompts and group) or prompts * group % value:
        raise ValueError("does not divide the completions of a step; set minibatches")
    return {"minibatches": prompts * group // value}


def beside(switch: str, place: str) -> Translate:
    """A setting that counts only when the switch beside it is on; `place` may be empty."""
    return lambda value, leaves: translate(place, value, {}) if leaves.get(switch) and place else {}


def lora_targets(value: Any, leaves: Leaves) -> Places:
    everything = leaves.get(f"{_LORA}.match_all_linear", True) or not value
    wanted = beside(f"{_LORA}.enabled", "model.lora.target_modules")
    return wanted("all-linear" if everything else value, leaves)


def optimizer_name(value: Any, _: Leaves) -> Places:
    return refused("the optimiser here is AdamW")(str(value).rpartition(".")[2] != "AdamW", {})


def scheduler(value: Any, leaves: Leaves) -> Places:
    """A chain of torch schedulers: a linear rise, then constant, linear or cosine."""
    places: Places = {}
    stages = [stage for stage in value or [] if "name" in stage]
    names = [stage["name"].rpartition(".")[2] for stage in stages]
    if names and names[0] == "LinearLR" and stages[0]["kwargs"].get("start_factor", 1) < 1:
        places["optimizer.warmup_steps"] = stages.pop(0)["kwargs"]["total_iters"]
        names.pop(0)
    if names in ([], ["ConstantLR"]):
        return {**places, "optimizer.schedule": "constant"}
    if names != ["CosineAnnealingLR"]:
        raise ValueError(
            "no such schedule; optimizer.schedule is constant, linear or cosine, with warmup_steps"
        )
    rate, floor = leaves.get("policy.optimizer.kwargs.lr"), stages[0]["kwargs"].get("eta_min", 0.0)
    if rate and floor:
        places["optimizer.min_learning_rate_ratio"] = floor / rate
    return {**places, "optimizer.schedule": "cosine"}


def checkpoints(value: Any, _: Leaves) -> Places:
    return refused("a run always ends with a checkpoint; checkpoint.every = 0 makes no other")(not value, {})


def answer_column(value: Any, _: Leaves) -> Places:
    return {"dataset.rename": {value: "answer"}} if value != "answer" else {}


_ALGORITHM = mapped(
    "algorithm", {"grpo": "grpo", "dpo": "dpo"}, "is not offered; the algorithms here are grpo and dpo"
)
_SCALE = mapped("advantage.scale_rewards", {True: "group", False: "none"})
_BASELINE = mapped("advantage.baseline", {True: "leave_one_out", False: "mean"})
_LORA = "policy.dtensor_cfg.lora_cfg"
_PACKING = "policy.sequence_packing.enabled"
_CORRECTED = "loss_fn.use_importance_sampling_correction"
_SUM_OF_LOSSES = refused("see preference.loss.loss_type, which takes a sum with sft")


RULES: dict[str, str | Translate] = {
    "algorithm": _ALGORITHM,
    "algorithm.name": _ALGORITHM,
    "checkpointing.checkpoint_dir": "output_dir",
    "checkpointing.enabled": checkpoints,
    "checkpointing.keep_top_k": "checkpoint.keep",
    "checkpointing.save_period": "checkpoint.every",
    "data.dataset_name": "dataset.source",
    "data.input_key": "dataset.prompt_column",
    "data.max_input_seq_length": "dataset.max_prompt_length",
    "data.output_key": answer_column,
    "data.train.data_path": "dataset.source",
    "data.train.dataset_name": "dataset.source",
    "data.train.input_key": "dataset.prompt_column",
    "data.train.output_key": answer_column,
    "data.train.split": "dataset.split",
    "data.train.subset": "dataset.name",
    "data.train_data_path": "dataset.source",
    "data.train_split": "dataset.split",
    "data.val_data_path": "evaluation.dataset.source",
    "data.val_split": "evaluation.dataset.split",
    "data.validation.data_path": "evaluation.dataset.source",
    "data.validation.dataset_name": "evaluation.dataset.source",
    "data.validation.input_key": "evaluation.dataset.prompt_column",
    "data.validation.split": "evaluation.dataset.split",
    "dpo.max_num_steps": "max_steps",
    "dpo.preference_average_log_probs": refused(
        "loss_type ipo and simpo compare per token; sigmoid does not"
    ),
    "dpo.reference_policy_kl_penalty": "preference.loss.beta",
    "dpo.seed": "seed",
    "dpo.sft_average_log_probs": _SUM_OF_LOSSES,
    "dpo.sft_loss_weight": _SUM_OF_LOSSES,
    "dpo.val_period": "evaluation.every",
    "env.math.math_verify_impl": lambda *_: {"rewards": [{"reward": "math_verify"}]},
    "grpo.adv_estimator.name": mapped(
        "advantage",
        {"grpo": ...},
        "advantages are GRPO's; see loss.loss_type for the losses of other estimators",
    ),
    "grpo.adv_estimator.normalize_rewards": _SCALE,
    "grpo.adv_estimator.use_leave_one_out_baseline": _BASELINE,
    "grpo.dynamic_sampling_max_gen_batches": "advantage.max_draws",
    "grpo.max_num_steps": max_steps,
    "grpo.max_val_samples": "evaluation.size",
    "grpo.normalize_rewards": _SCALE,
    "grpo.num_generations_per_prompt": "rollout.num_generations",
    "grpo.num_prompts_per_step": "prompts_per_step",
    "grpo.overlong_filtering": "advantage.mask_truncated",
    "grpo.seed": "seed",
    "grpo.use_dynamic_sampling": "advantage.dynamic_sampling",
    "grpo.use_leave_one_out_baseline": _BASELINE,
    "grpo.val_num_generations_per_prompt": "evaluation.num_samples",
    "grpo.val_period": "evaluation.every",
    "logger.tensorboard_enabled": "logging.tensorboard",
    "logger.wandb.project": "logging.project",
    "logger.wandb_enabled": "logging.wandb",
    "loss_fn.disable_ppo_ratio": refused("choose loss.loss_type gpg, rloo or reinforce"),
    "loss_fn.force_on_policy_ratio": refused("set minibatches and num_iterations to 1 instead"),
    "loss_fn.positive_example_nll_weight": refused("the loss has no such term"),
    "loss_fn.ratio_clip_c": "loss.delta",
    "loss_fn.ratio_clip_max": "loss.epsilon_high",
    "loss_fn.ratio_clip_min": "loss.epsilon_low",
    "loss_fn.reference_policy_kl_penalty": "loss.beta",
    "loss_fn.reference_policy_kl_type": "loss.kl_estimator",
    "loss_fn.sequence_level_importance_ratios": when("loss.importance_sampling_level", "sequence"),
    "loss_fn.token_level_loss": loss_type,
    "loss_fn.truncated_importance_sampling_ratio": beside(_CORRECTED, "loss.sampler_clip_max"),
    "loss_fn.truncated_importance_sampling_ratio_min": beside(_CORRECTED, "loss.sampler_clip_min"),
    "loss_fn.truncated_importance_sampling_type": beside(_CORRECTED, ""),
    "loss_fn.use_cispo": when("loss.loss_type", "cispo"),
    "loss_fn.use_importance_sampling_correction": sampler_correction,
    "loss_fn.use_kl_in_reward": "loss.kl_in_reward",
    "loss_fn.use_on_policy_kl_approximation": refused("see loss.use_bias_correction_kl"),
    "policy.dtensor_cfg.activation_checkpointing": "model.gradient_checkpointing",
    f"{_LORA}.alpha": beside(f"{_LORA}.enabled", "model.lora.alpha"),
    f"{_LORA}.dim": beside(f"{_LORA}.enabled", "model.lora.r"),
    f"{_LORA}.dropout": beside(f"{_LORA}.enabled", "model.lora.dropout"),
    f"{_LORA}.target_modules": lora_targets,
    "policy.generation.backend": lambda value, _: {
        "rollout.engine": "vllm" if value == "vllm" else "transformers"
    },
    "policy.generation.max_new_tokens": "rollout.max_completion_length",
    "policy.generation.stop_strings": MOVED["stop"],
    "policy.generation.temperature": "rollout.temperature",
    "policy.generation.top_k": MOVED["top_k"],
    "policy.generation.top_p": "rollout.top_p",
    "policy.generation.val_temperature": "evaluation.temperature",
    "policy.max_grad_norm": "optimizer.max_grad_norm",
    "policy.model_name": "model.path",
    "policy.optimizer.kwargs.betas": "optimizer.betas",
    "policy.optimizer.kwargs.eps": "optimizer.eps",
    "policy.optimizer.kwargs.lr": "optimizer.learning_rate",
    "policy.optimizer.kwargs.weight_decay": "optimizer.weight_decay",
    "policy.optimizer.name": optimizer_name,
    "policy.precision": "model.dtype",
    "policy.scheduler": scheduler,
    "policy.sequence_packing.train_mb_tokens": beside(
        "policy.sequence_packing.enabled", "micro_batch_tokens"
    ),
    "policy.train_global_batch_size": minibatches,
}

# Why whole parts have no place here, by the longest prefix that fits.
REASONS: dict[str, str] = {
    "checkpointing": "a checkpoint holds all that resuming needs, and the newest are kept: checkpoint.keep",
    "cluster": "one process drives the model; it is started where it runs",
    "data": "rows become prompts by dataset.prompt_column, prompt_template and system_prompt",
    "data.shuffle": "prompts are drawn in a seeded shuffle",
    "data_plane": "rollout and training are one process",
    "dpo": "held-out pairs are scored like a step's, and steps are counted, not epochs",
    "dpo.preference_loss_weight": "a sum of losses has preference.loss.loss_weights",
    "env": "answers are scored by functions: set `rewards`",
    "env.math.num_workers": "rewards run in threads, each with a time limit: rewards.timeout",
    "grpo.advantage_clip": "advantages are not clipped",
    "grpo.async_grpo": "generation and training take turns; completions are always the current policy's",
    "grpo.batch_multiplier": "dynamic sampling draws whole batches: advantage.max_draws",
    "grpo.adv_estimator.minus_baseline": "belongs to another estimator of advantages",
    "grpo.invalid_tool_call_advantage": "answers are single turns, without tools",
    "grpo.malformed_thinking_advantage": "score it by a reward, such as tag_format",
    "grpo.max_num_epochs": "a run is counted in steps: set max_steps",
    "grpo.max_rollout_turns": "answers are single turns",
    "grpo.reward_scaling": "scale a reward by its weight, or inside the function",
    "grpo.reward_shaping": "add the reward soft_overlong",
    "grpo.seq_logprob_error_threshold": "see loss.sampler_correction",
    "grpo.stop_at_validation": "a run ends at max_steps, or by a signal, which saves it",
    "grpo.val": "held-out questions are scored before and after, and every evaluation.every steps",
    "logger": "metrics are always JSONL; see the keys of `logging`",
    "loss_fn.kl_": "the KL terms are not clamped",
    "on_policy_distillation": "there is no teacher",
    "policy.draft": "there is no speculative decoding",
    "policy.dtensor_cfg": "one process drives the model; there is nothing to shard",
    "policy.dtensor_cfg.lora_cfg": "LoRA runs through peft; see the keys of `model.lora`",
    "policy.dynamic_batching": "sequences are packed by tokens: micro_batch_tokens",
    "policy.generation": "the rollout engine sets itself up; see the keys of `rollout`",
    "policy.generation.val_top": "held-out answers are drawn like the rollout's but for the temperature",
    "policy.generation_batch_size": "completions in flight are limited by tokens: rollout.max_batch_tokens",
    "policy.hf_config_overrides": "the model's own configuration holds",
    "policy.logprob": "log-probabilities never need whole logits; there is nothing to chunk",
    "policy.make_sequence_length_divisible_by": "nothing is padded",
    "policy.max_total_sequence_length": "set dataset.max_prompt_length and rollout.max_completion_length",
    "policy.megatron_cfg": "models run through transformers; there is no Megatron",
    "policy.offload_optimizer_for_logprob": "the optimizer stays where the model is",
    "policy.optimizer": "the optimiser is torch's AdamW on all trained weights",
    "policy.sequence_packing": "sequences are always packed",
    "policy.tokenizer": "the tokenizer is the model's own; see model.chat_template",
    "policy.train_micro_batch_size": "sequences are packed by tokens: micro_batch_tokens",
    "reward_penalties": "score it by a reward",
}
