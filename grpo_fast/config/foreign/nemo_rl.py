"""NeMo-RL: the YAML of a GRPO or DPO run, in its sections (`grpo:`, `loss_fn:`, ...) or one `algorithm:`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from grpo_fast.config.foreign.conversion import Conversion, Entry, convert_entries, default_entries
from grpo_fast.config.foreign.names import NAMES, betas, clip
from grpo_fast.config.foreign.references import resolve
from grpo_fast.config.foreign.rules import (
    Absent,
    Places,
    Rule,
    Siblings,
    by_table,
    find_rule,
    load_yaml,
    rules_of,
)
from grpo_fast.config.foreign.trl import PREFERENCE
from grpo_fast.config.tree import flatten

# What a missing key means there, where ours would mean something else.
DEFAULTS = {"loss_fn.use_importance_sampling_correction": False}


def read_nemo_rl(document: Mapping[str, Any]) -> Conversion:
    """Every leaf is an entry, references resolved."""
    leaves = resolve(flatten(document))
    name = leaves.get("algorithm.name", leaves.get("algorithm", "dpo" if "dpo" in document else "grpo"))
    preference = name == "dpo"
    flat_names = NAMES | (PREFERENCE if preference else {})
    siblings = dict(leaves)
    # A game makes its own rows and rewards, whatever else the file has inherited.
    games = sorted({key.split(".")[1] for key in leaves if key.startswith("env.")} - {*_SCORERS})
    entries: list[Entry] = []
    for key, value in leaves.items():
        known, leaf = key, key.removeprefix("algorithm.")
        if leaf not in (key, "name"):  # in the form of one section
            sections = ("dpo",) if preference else ("grpo", "loss_fn")
            known = next((name for s in sections if (name := f"{s}.{leaf}") in RULES), leaf)
            siblings[known] = value
        rule = flat_names.get(known) if known == leaf != key else find_rule(known, RULES)
        if games and key.startswith(("env.", "data.")):
            rule = (
                _GAME if key.split(".")[1] in games else Absent(f"belongs to what {games[0]} is in place of")
            )
        if key.startswith(_OFF[bool(leaves.get(f"{_MEGATRON}.enabled"))]) and not key.endswith(".enabled"):
            rule = Absent("belongs to the backend that is off")
        entries.append(Entry(key, value, rule))
    entries += default_entries("NeMo-RL", DEFAULTS, siblings, RULES)
    # Several keys of this section say together what the loss is.
    entries.sort(key=lambda entry: not entry.key.startswith("loss_fn."))
    return convert_entries("NeMo-RL", entries, siblings, preference=preference)


def loss_type(value: Any, leaves: Siblings) -> Places:
    if leaves.get("loss_fn.use_cispo"):
        return {"loss.loss_type": "cispo"}
    if leaves.get("loss_fn.disable_ppo_ratio"):
        raise ValueError("REINFORCE's normalisation differs; choose loss.loss_type gpg, rloo or reinforce")
    return {"loss.loss_type": "dapo" if value else "grpo"}


def sampler_correction(value: Any, leaves: Siblings) -> Places:
    if not value:
        return {"loss.sampler_correction": "none"}
    bounded = leaves.get("loss_fn.truncated_importance_sampling_ratio")
    kind = leaves.get("loss_fn.truncated_importance_sampling_type") or ("tis" if bounded else None)
    modes = {"tis": "token_truncate", "icepop": "token_mask"}
    otherwise = "a correction without bounds, or by sequence and token at once, is not offered"
    return by_table(kind, {}, to="loss.sampler_correction", values=modes, otherwise=otherwise)


def minibatches(value: Any, leaves: Siblings) -> Places:
    if any(key.startswith("dpo.") for key in leaves):
        return {"prompts_per_step": value}
    prompts, group = leaves.get("grpo.num_prompts_per_step"), leaves.get("grpo.num_generations_per_prompt")
    if not (prompts and group) or prompts * group % value:
        raise ValueError("does not divide the completions of a step; set minibatches")
    return {"minibatches": prompts * group // value}


def lora_targets(value: Any, leaves: Siblings) -> Places:
    if not leaves.get(f"{_LORA}.enabled"):
        return {}
    everything = leaves.get(f"{_LORA}.match_all_linear", True) or not value
    return {"model.lora.target_modules": "all-linear" if everything else value}


def scheduler(value: Any, leaves: Siblings) -> Places:
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


def answer_column(value: Any, _: Siblings) -> Places:
    return {"dataset.rename": {value: "answer"}} if value != "answer" else {}


# Sections of `env` that score answers; `env_name` says which does.
_SCORERS = ("math", "dapo", "code", "code_jaccard", "reward_model", "math_multi_reward")
_GAME = Absent(
    "an environment of NeMo-RL's own; write its class for rollout.environment, and its rows as a file",
    decide=True,
)
_LORA = "policy.dtensor_cfg.lora_cfg"
_MEGATRON = "policy.megatron_cfg"
# What does not count with Megatron, and without.
_OFF = {True: ("policy.optimizer.", "policy.scheduler", "policy.dtensor_cfg."), False: (f"{_MEGATRON}.",)}
RULES: dict[str, Rule] = {
    **dict(rules_of(load_yaml("nemo_rl.yaml"))),
    "data.output_key": answer_column,
    "data.train.output_key": answer_column,
    "loss_fn.ratio_clip_max": partial(clip, "high", "loss_fn.use_cispo", True),
    "loss_fn.ratio_clip_min": partial(clip, "low", "loss_fn.use_cispo", True),
    "loss_fn.token_level_loss": loss_type,
    "loss_fn.use_importance_sampling_correction": sampler_correction,
    f"{_LORA}.target_modules": lora_targets,
    f"{_MEGATRON}.optimizer.adam_beta1": partial(betas, f"{_MEGATRON}.optimizer."),
    f"{_MEGATRON}.optimizer.adam_beta2": partial(betas, f"{_MEGATRON}.optimizer."),
    "policy.generation.stop_strings": NAMES["stop"],
    "policy.generation.top_k": NAMES["top_k"],
    "policy.scheduler": scheduler,
    "policy.train_global_batch_size": minibatches,
}
