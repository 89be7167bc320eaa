"""NeMo-RL: the YAML of a GRPO or DPO run, in its sections (`grpo:`, `loss_fn:`, ...) or one `algorithm:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.conversion import Conversion, Entry, convert_entries
from grpo_fast.convert.names import NAMES
from grpo_fast.convert.references import flatten, resolve
from grpo_fast.convert.rules import Absent, Places, Rule, by_table, find_rule, load_yaml, rules_of
from grpo_fast.convert.trl import PREFERENCE

Leaves = Mapping[str, Any]


def read_nemo_rl(document: Mapping[str, Any]) -> Conversion:
    """Every leaf is an entry, references resolved."""
    leaves = resolve(flatten(document))
    name = leaves.get("algorithm.name", leaves.get("algorithm", "dpo" if "dpo" in document else "grpo"))
    preference = name == "dpo"
    flat_names = NAMES | (PREFERENCE if preference else {})
    siblings = dict(leaves)
    entries: list[Entry] = []
    for key, value in leaves.items():
        known, leaf = key, key.removeprefix("algorithm.")
        if leaf not in (key, "name"):  # in the form of one section
            sections = ("dpo",) if preference else ("grpo", "loss_fn")
            known = next((name for s in sections if (name := f"{s}.{leaf}") in RULES), leaf)
            siblings[known] = value
        rule = flat_names.get(known) if known == leaf != key else find_rule(known, RULES)
        if isinstance(value, str) and "${" in value:
            rule = Absent("refers to something outside this file; set it by hand")
        entries.append(Entry(key, value, rule))
    # Several keys of this section say together what the loss is.
    entries.sort(key=lambda entry: not entry.key.startswith("loss_fn."))
    return convert_entries("NeMo-RL", entries, siblings, preference=preference)


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
    modes = {"tis": "token_truncate", "icepop": "token_mask"}
    otherwise = "a correction without bounds, or by sequence and token at once, is not offered"
    return by_table(kind, {}, to="loss.sampler_correction", values=modes, otherwise=otherwise)


def minibatches(value: Any, leaves: Leaves) -> Places:
    if any(key.startswith("dpo.") for key in leaves):
        return {"prompts_per_step": value}
    prompts, group = leaves.get("grpo.num_prompts_per_step"), leaves.get("grpo.num_generations_per_prompt")
    if not (prompts and group) or prompts * group % value:
        raise ValueError("does not divide the completions of a step; set minibatches")
    return {"minibatches": prompts * group // value}


def lora_targets(value: Any, leaves: Leaves) -> Places:
    if not leaves.get(f"{_LORA}.enabled"):
        return {}
    everything = leaves.get(f"{_LORA}.match_all_linear", True) or not value
    return {"model.lora.target_modules": "all-linear" if everything else value}


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


def answer_column(value: Any, _: Leaves) -> Places:
    return {"dataset.rename": {value: "answer"}} if value != "answer" else {}


_LORA = "policy.dtensor_cfg.lora_cfg"
RULES: dict[str, Rule] = {
    **dict(rules_of(load_yaml("nemo_rl.yaml"))),
    "data.output_key": answer_column,
    "data.train.output_key": answer_column,
    "env.math.math_verify_impl": lambda *_: {"rewards": [{"reward": "math_verify"}]},
    "grpo.max_num_steps": max_steps,
    "loss_fn.token_level_loss": loss_type,
    "loss_fn.truncated_importance_sampling_type": lambda *_: {},  # read with the correction itself
    "loss_fn.use_importance_sampling_correction": sampler_correction,
    f"{_LORA}.target_modules": lora_targets,
    "policy.generation.backend": lambda value, _: {
        "rollout.engine": "vllm" if value == "vllm" else "transformers"
    },
    "policy.generation.stop_strings": NAMES["stop"],
    "policy.generation.top_k": NAMES["top_k"],
    "policy.scheduler": scheduler,
    "policy.train_global_batch_size": minibatches,
}
