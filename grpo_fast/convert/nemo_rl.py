"""NeMo-RL: the YAML of a GRPO or DPO run, in its sections (`grpo:`, `loss_fn:`, ...) or one `algorithm:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.conversion import Entry, ForeignConfig
from grpo_fast.convert.names import (
    MOVED,
    NAMES,
    Absent,
    Places,
    Rule,
    Translate,
    find_rule,
    load_rules,
    mapped,
    refused,
    translate,
    when,
)
from grpo_fast.convert.references import flatten, resolve
from grpo_fast.convert.trl import PREFERENCE

Leaves = Mapping[str, Any]


def read_nemo_rl(document: Mapping[str, Any]) -> ForeignConfig:
    """Every leaf is an entry, references resolved."""
    leaves = resolve(flatten(document))
    name = leaves.get("algorithm.name", leaves.get("algorithm", "dpo" if "dpo" in document else "grpo"))
    preference = name == "dpo"
    rules = load_rules("nemo_rl.yaml") | TRANSLATED
    flat_names = NAMES | (PREFERENCE if preference else {})
    siblings = dict(leaves)
    entries: list[Entry] = []
    for key, value in leaves.items():
        known, leaf = key, key.removeprefix("algorithm.")
        if leaf not in (key, "name"):  # in the form of one section
            sections = ("dpo",) if preference else ("grpo", "loss_fn")
            known = next((name for s in sections if (name := f"{s}.{leaf}") in rules), leaf)
            siblings[known] = value
        rule = flat_names.get(known) if known == leaf != key else find_rule(known, rules)
        if isinstance(value, str) and "${" in value:
            rule = Absent("refers to something outside this file; set it by hand")
        entries.append(Entry(key, value, rule))
    # Several keys of this section say together what the loss is.
    entries.sort(key=lambda entry: not entry.key.startswith("loss_fn."))
    return ForeignConfig("NeMo-RL", preference, entries, siblings)


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


TRANSLATED: dict[str, Rule] = {
    "algorithm": _ALGORITHM,
    "algorithm.name": _ALGORITHM,
    "checkpointing.enabled": checkpoints,
    "data.output_key": answer_column,
    "data.train.output_key": answer_column,
    "dpo.preference_average_log_probs": refused(
        "loss_type ipo and simpo compare per token; sigmoid does not"
    ),
    "dpo.sft_average_log_probs": _SUM_OF_LOSSES,
    "dpo.sft_loss_weight": _SUM_OF_LOSSES,
    "env.math.math_verify_impl": lambda *_: {"rewards": [{"reward": "math_verify"}]},
    "grpo.adv_estimator.name": mapped(
        "advantage",
        {"grpo": ...},
        "advantages are GRPO's; see loss.loss_type for the losses of other estimators",
    ),
    "grpo.adv_estimator.normalize_rewards": _SCALE,
    "grpo.adv_estimator.use_leave_one_out_baseline": _BASELINE,
    "grpo.max_num_steps": max_steps,
    "grpo.normalize_rewards": _SCALE,
    "grpo.use_leave_one_out_baseline": _BASELINE,
    "loss_fn.disable_ppo_ratio": refused("choose loss.loss_type gpg, rloo or reinforce"),
    "loss_fn.force_on_policy_ratio": refused("set minibatches and num_iterations to 1 instead"),
    "loss_fn.positive_example_nll_weight": refused("the loss has no such term"),
    "loss_fn.sequence_level_importance_ratios": when("loss.importance_sampling_level", "sequence"),
    "loss_fn.token_level_loss": loss_type,
    "loss_fn.truncated_importance_sampling_ratio": beside(_CORRECTED, "loss.sampler_clip_max"),
    "loss_fn.truncated_importance_sampling_ratio_min": beside(_CORRECTED, "loss.sampler_clip_min"),
    "loss_fn.truncated_importance_sampling_type": beside(_CORRECTED, ""),
    "loss_fn.use_cispo": when("loss.loss_type", "cispo"),
    "loss_fn.use_importance_sampling_correction": sampler_correction,
    "loss_fn.use_on_policy_kl_approximation": refused("see loss.use_bias_correction_kl"),
    f"{_LORA}.alpha": beside(f"{_LORA}.enabled", "model.lora.alpha"),
    f"{_LORA}.dim": beside(f"{_LORA}.enabled", "model.lora.r"),
    f"{_LORA}.dropout": beside(f"{_LORA}.enabled", "model.lora.dropout"),
    f"{_LORA}.target_modules": lora_targets,
    "policy.generation.backend": lambda value, _: {
        "rollout.engine": "vllm" if value == "vllm" else "transformers"
    },
    "policy.generation.stop_strings": MOVED["stop"],
    "policy.generation.top_k": MOVED["top_k"],
    "policy.optimizer.name": optimizer_name,
    "policy.scheduler": scheduler,
    "policy.sequence_packing.train_mb_tokens": beside(
        "policy.sequence_packing.enabled", "micro_batch_tokens"
    ),
    "policy.train_global_batch_size": minibatches,
}
