"""NeMo-RL: the YAML of a GRPO or DPO run, in its sections (`grpo:`, `loss_fn:`, ...) or one `algorithm:`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpo_fast.config_io.foreign_rules import Places
from grpo_fast.convert.conversion import UNKNOWN, Account, Conversion
from grpo_fast.convert.nemo_rl_keys import MOVED, reason_for
from grpo_fast.convert.references import flatten, resolve

Leaves = Mapping[str, Any]


def convert_nemo_rl(document: Mapping[str, Any]) -> Conversion:
    """Every leaf of the document is in the account, references resolved."""
    leaves = resolve(flatten(document))
    name = leaves.get("algorithm.name", leaves.get("algorithm", "dpo" if "dpo" in document else "grpo"))
    account = Account("NeMo-RL", preference=name == "dpo")
    for key in sorted(leaves, key=lambda key: not key.startswith("loss_fn.")):
        put_leaf(account, key, leaves[key], leaves)
    return account.finish()


def put_leaf(account: Account, key: str, value: Any, leaves: Leaves) -> None:
    """One leaf, by the first of: a translation of its own, its place, a reason, the table of flat names."""
    if isinstance(value, str) and "${" in value:
        account.leave(key, value, "refers to something outside this file; set it by hand")
    elif key in ("algorithm", "algorithm.name"):
        put_algorithm(account, key, value)
    elif key in TRANSLATED:
        account.translate(key, value, TRANSLATED[key], leaves)
    elif key in MOVED:
        account.put(key, value, {} if value is None else {MOVED[key]: value})
    elif key.startswith("algorithm."):
        put_algorithm_leaf(account, key, value, leaves)
    else:
        account.leave(key, value, reason_for(key) or UNKNOWN)


def put_algorithm(account: Account, key: str, value: Any) -> None:
    if value in ("grpo", "dpo"):
        account.put(key, value, {"algorithm": value})
    else:
        account.leave(key, value, "is not offered; the algorithms here are grpo and dpo")


def put_algorithm_leaf(account: Account, key: str, value: Any, leaves: Leaves) -> None:
    """A leaf of the one-section form, under NeMo-RL's own names or the common flat ones."""
    name = key.removeprefix("algorithm.")
    for section in ("dpo",) if account.preference else ("grpo", "loss_fn"):
        known = f"{section}.{name}"
        if known in TRANSLATED or known in MOVED:
            probe = Account(account.source, account.preference)
            put_leaf(probe, known, value, {**leaves, known: value})
            row = probe.rows[0]
            if row.outcome == "not applicable":
                account.leave(key, value, row.reason)
            else:
                account.put(key, value, {place: probe.places[place] for place in row.places})
            return
    siblings = {leaf.removeprefix("algorithm."): item for leaf, item in leaves.items()}
    account.by_table(key, name, value, siblings)


def loss_type(value: Any, leaves: Leaves) -> Places:
    if leaves.get("loss_fn.use_cispo"):
        return {"loss.loss_type": "cispo"}
    if leaves.get("loss_fn.disable_ppo_ratio"):
        raise ValueError("REINFORCE's normalisation differs; choose loss.loss_type gpg, rloo or reinforce")
    return {"loss.loss_type": "dapo" if value else "grpo"}


def only_false(reason: str) -> Callable[[Any, Leaves], Places]:
    def translate(value: Any, _: Leaves) -> Places:
        if value:
            raise ValueError(reason)
        return {}

    return translate


def cispo(value: Any, _: Leaves) -> Places:
    return {"loss.loss_type": "cispo"} if value else {}


def ratio_level(value: Any, _: Leaves) -> Places:
    return {"loss.importance_sampling_level": "sequence"} if value else {}


def scale(value: Any, _: Leaves) -> Places:
    return {"advantage.scale_rewards": "group" if value else "none"}


def baseline(value: Any, _: Leaves) -> Places:
    return {"advantage.baseline": "leave_one_out" if value else "mean"}


def estimator(value: Any, _: Leaves) -> Places:
    if value != "grpo":
        raise ValueError("advantages are GRPO's; see loss.loss_type for the losses of other estimators")
    return {}


def max_steps(value: Any, _: Leaves) -> Places:
    if value >= 1_000_000:
        raise ValueError("it stands for no limit; set max_steps (epochs x questions / prompts_per_step)")
    return {"max_steps": value}


_CORRECTIONS = {"tis": "token_truncate", "icepop": "token_mask"}


def sampler_correction(value: Any, leaves: Leaves) -> Places:
    if not value:
        return {"loss.sampler_correction": "none"}
    kind = leaves.get("loss_fn.truncated_importance_sampling_type") or (
        "tis" if leaves.get("loss_fn.truncated_importance_sampling_ratio") else None
    )
    if kind not in _CORRECTIONS:
        raise ValueError("a correction without bounds, or by sequence and token at once, is not offered")
    return {"loss.sampler_correction": _CORRECTIONS[kind]}


def correction_part(place: str | None) -> Callable[[Any, Leaves], Places]:
    """A setting that counts only when the correction is on."""

    def translate(value: Any, leaves: Leaves) -> Places:
        on = leaves.get("loss_fn.use_importance_sampling_correction")
        return {place: value} if on and place and value is not None else {}

    return translate


def minibatches(value: Any, leaves: Leaves) -> Places:
    if any(key.startswith("dpo.") for key in leaves):
        return {"prompts_per_step": value}
    prompts, group = leaves.get("grpo.num_prompts_per_step"), leaves.get("grpo.num_generations_per_prompt")
    if not (prompts and group) or prompts * group % value:
        raise ValueError("does not divide the completions of a step; set minibatches")
    return {"minibatches": prompts * group // value}


def micro_batch_tokens(value: Any, leaves: Leaves) -> Places:
    return {"micro_batch_tokens": value} if leaves.get("policy.sequence_packing.enabled") else {}


def lora(key: str) -> Callable[[Any, Leaves], Places]:
    def translate(value: Any, leaves: Leaves) -> Places:
        return {f"model.lora.{key}": value} if leaves.get("policy.dtensor_cfg.lora_cfg.enabled") else {}

    return translate


def lora_targets(value: Any, leaves: Leaves) -> Places:
    everything = leaves.get("policy.dtensor_cfg.lora_cfg.match_all_linear", True)
    return lora("target_modules")("all-linear" if everything or not value else value, leaves)


def optimizer_name(value: Any, _: Leaves) -> Places:
    if str(value).rpartition(".")[2] != "AdamW":
        raise ValueError("the optimiser here is AdamW")
    return {}


def scheduler(value: Any, leaves: Leaves) -> Places:
    """A chain of torch schedulers: a linear rise, then constant, linear or cosine."""
    rise: Places = {}
    stages = [stage for stage in value or [] if "name" in stage]
    names = [stage["name"].rpartition(".")[2] for stage in stages]
    if names and names[0] == "LinearLR" and stages[0]["kwargs"].get("start_factor", 1) < 1:
        rise = {"optimizer.warmup_steps": stages[0]["kwargs"]["total_iters"]}
        stages, names = stages[1:], names[1:]
    if names in ([], ["ConstantLR"]):
        return {**rise, "optimizer.schedule": "constant"}
    if names == ["CosineAnnealingLR"]:
        rate = leaves.get("policy.optimizer.kwargs.lr")
        floor = stages[0]["kwargs"].get("eta_min", 0.0)
        places = {**rise, "optimizer.schedule": "cosine"}
        return {**places, "optimizer.min_learning_rate_ratio": floor / rate} if rate and floor else places
    raise ValueError("no such schedule; optimizer.schedule is constant, linear or cosine, with warmup_steps")


def backend(value: Any, _: Leaves) -> Places:
    return {"rollout.engine": "vllm" if value == "vllm" else "transformers"}


def top_k(value: Any, _: Leaves) -> Places:
    return {"rollout.top_k": 0 if value in (None, -1) else value}


def stop(value: Any, _: Leaves) -> Places:
    return {"rollout.stop": list(value)} if value else {}


def answer_column(value: Any, _: Leaves) -> Places:
    return {"dataset.rename": {value: "answer"}} if value != "answer" else {}


def math_reward(value: Any, _: Leaves) -> Places:
    return {"rewards": [{"reward": "math_verify"}]}


def checkpoints(value: Any, _: Leaves) -> Places:
    if not value:
        raise ValueError("a run always ends with a checkpoint; checkpoint.every = 0 makes no other")
    return {}


TRANSLATED: dict[str, Callable[[Any, Leaves], Places]] = {
    "checkpointing.enabled": checkpoints,
    "data.train.output_key": answer_column,
    "data.output_key": answer_column,
    "dpo.preference_average_log_probs": only_false(
        "loss_type ipo and simpo compare per token; sigmoid does not"
    ),
    "dpo.sft_average_log_probs": only_false("see preference.loss.loss_type, which takes a sum with sft"),
    "dpo.sft_loss_weight": only_false("see preference.loss.loss_type, which takes a sum with sft"),
    "env.math.math_verify_impl": math_reward,
    "grpo.adv_estimator.name": estimator,
    "grpo.adv_estimator.normalize_rewards": scale,
    "grpo.adv_estimator.use_leave_one_out_baseline": baseline,
    "grpo.max_num_steps": max_steps,
    "grpo.normalize_rewards": scale,
    "grpo.use_leave_one_out_baseline": baseline,
    "loss_fn.disable_ppo_ratio": only_false("choose loss.loss_type gpg, rloo or reinforce"),
    "loss_fn.force_on_policy_ratio": only_false("set minibatches and num_iterations to 1 instead"),
    "loss_fn.positive_example_nll_weight": only_false("the loss has no such term"),
    "loss_fn.sequence_level_importance_ratios": ratio_level,
    "loss_fn.token_level_loss": loss_type,
    "loss_fn.truncated_importance_sampling_ratio": correction_part("loss.sampler_clip_max"),
    "loss_fn.truncated_importance_sampling_ratio_min": correction_part("loss.sampler_clip_min"),
    "loss_fn.truncated_importance_sampling_type": correction_part(None),
    "loss_fn.use_cispo": cispo,
    "loss_fn.use_importance_sampling_correction": sampler_correction,
    "loss_fn.use_on_policy_kl_approximation": only_false("see loss.use_bias_correction_kl"),
    "policy.dtensor_cfg.lora_cfg.alpha": lora("alpha"),
    "policy.dtensor_cfg.lora_cfg.dim": lora("r"),
    "policy.dtensor_cfg.lora_cfg.dropout": lora("dropout"),
    "policy.dtensor_cfg.lora_cfg.target_modules": lora_targets,
    "policy.generation.backend": backend,
    "policy.generation.stop_strings": stop,
    "policy.generation.top_k": top_k,
    "policy.optimizer.name": optimizer_name,
    "policy.scheduler": scheduler,
    "policy.sequence_packing.train_mb_tokens": micro_batch_tokens,
    "policy.train_global_batch_size": minibatches,
}
