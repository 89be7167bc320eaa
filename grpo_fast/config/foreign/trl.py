"""TRL: a `GRPOConfig` or `DPOConfig` as JSON, or the YAML of its command line."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from grpo_fast.config.foreign.conversion import Conversion, Entry, convert_entries, default_entries
from grpo_fast.config.foreign.names import NAMES, REWARDS
from grpo_fast.config.foreign.rules import (
    Absent,
    NotApplicable,
    Places,
    Rule,
    Siblings,
    load_yaml,
    rules_of,
    translate,
)
from grpo_fast.config.rewards import BUILTINS
from grpo_fast.objective.comparisons import PREFERENCE_LOSSES

# What a missing key means there, where ours would mean something else.
DEFAULTS: dict[str, Any] = {
    "max_completion_length": 512,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.999,
    "gradient_checkpointing": True,
    "num_train_epochs": 3.0,
}
BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")
# What launchers call the processes that a batch is dealt to: one product, or its factors.
PROCESSES = (("num_processes",), ("nnodes", "nproc_per_node"), ("num_gpus",))
DPO_ONLY = ("precompute_ref_log_probs", "f_divergence_type", "truncation_mode", "ld_alpha")


def read_trl(document: Mapping[str, Any]) -> Conversion:
    """Each key with its rule; keys that only a `DPOConfig` has make it one."""
    preference = "num_generations" not in document and any(key in document for key in DPO_ONLY)
    rules, notes = trl_rules(document, preference)
    entries = [Entry(key, value, rules.get(key), notes.get(key, "")) for key, value in document.items()]
    entries += default_entries("TRL", with_usual(DEFAULTS, document), document, rules)
    return convert_entries("TRL", entries, {"use_peft": False, **document}, preference=preference)


def with_usual(defaults: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's defaults, and those that depend on what is set."""
    batch = {} if any(document.get(key) for key in BATCH) else {"per_device_train_batch_size": 8}
    defaults = {"num_generations": 8, **defaults}
    correction = {"vllm_importance_sampling_correction": True} if document.get("use_vllm") else {}
    kl = {"use_bias_correction_kl": True} if document.get("beta") else {}
    # Ours are the papers'.
    clip = {
        "cispo": {"epsilon_high": document.get("epsilon", 0.2)},
        "luspo": {"epsilon": 0.2, "importance_sampling_level": "token"},
    }
    own = clip.get(str(document.get("loss_type")), {})
    return {**defaults, **batch, **correction, **kl, **own}


def trl_rules(document: Mapping[str, Any], preference: bool) -> tuple[dict[str, Rule], dict[str, str]]:
    """The rule of each of TRL's names beside the other keys of the document, and a note for some."""
    batch, note, per_rollout = _batch(document, preference)
    rules = NAMES | (PREFERENCE if preference else {}) | dict.fromkeys(BATCH, batch)
    notes = dict.fromkeys(BATCH, note)
    asked = document.get("reward_funcs") or []
    asked = [asked] if isinstance(asked, str) else asked
    packages = {REWARDS[name]["reward"].partition(".")[0] for name in asked if name in REWARDS}
    if theirs := sorted(packages - BUILTINS.keys()):
        notes["reward_funcs"] = f"{' and '.join(theirs)} must be installed, and prompts be conversations"
    if per_rollout > 1:
        rules |= {key: partial(_in_rollouts, rules[key], per_rollout) for key in STEPS}
        notes |= dict.fromkeys(STEPS, f"a step here is a rollout, {per_rollout} optimiser steps there")
    return rules, notes


def _batch(document: Mapping[str, Any], preference: bool) -> tuple[Rule, str, int]:
    """Prompts a step and minibatches from TRL's four batch sizes; the last is optimiser steps per rollout.

    TRL generates `generation_batch_size` completions, by default per-device batch x processes x
    steps_per_generation, and makes an optimiser step of every `gradient_accumulation_steps` batches of them.
    """
    given = {key: document[key] for key in BATCH if document.get(key)}
    counts = [document.get(key, 1) for keys in PROCESSES if keys[-1] in document for key in keys]
    elsewhere = [key for key in ("config_file", "accelerate_config") if document.get(key) and not counts]
    if elsewhere or not all(isinstance(count, int) for count in counts):
        where = elsewhere[0] if elsewhere else "a variable"
        remedy = (
            "set prompts_per_step = per-device batch x gradient accumulation x processes / num_generations"
        )
        return Absent(f"how many processes share a batch is in {where}: {remedy}", decide=True), "", 1
    processes = prod(counts)
    group = 1 if preference else document.get("num_generations") or 8
    iterations = document.get("num_iterations") or 1
    if not all(isinstance(size, int) and size > 0 for size in (*given.values(), group, iterations)):
        return Absent("batch sizes are whole numbers above 0; set prompts_per_step", decide=True), "", 1
    batch = given.get("per_device_train_batch_size", 8)
    accumulation = given.get("gradient_accumulation_steps", 1)
    step = batch * accumulation * processes
    rollout = given.get("generation_batch_size") or batch * processes * (
        given.get("steps_per_generation") or accumulation
    )
    prompts, prompts_rest = divmod(rollout, group)
    minibatches, minibatches_rest = divmod(rollout, step)
    on = f"{processes} processes" if counts else "one process"
    note = f"as on {on}: {rollout} completions a rollout, {group} a prompt, {step} a step"
    if not prompts or not minibatches or prompts_rest or minibatches_rest or minibatches > prompts:
        return Absent(f"{note}: this does not divide; set prompts_per_step", decide=True), "", iterations
    places = {"prompts_per_step": prompts} | ({} if preference else {"minibatches": minibatches})

    def rule(value: Any, _: Siblings) -> Places:
        if value is None:
            raise NotApplicable("follows from the other batch sizes")
        return places

    return rule, note, minibatches * iterations


def _in_rollouts(rule: Rule, per_rollout: int, value: Any, siblings: Siblings) -> Places:
    whole = isinstance(value, int) and value > 0
    return translate(rule, -(-value // per_rollout) if whole else value, siblings)


def _preference_loss(value: Any, siblings: Siblings) -> Places:
    """TRL's names are ours, but for `sigmoid` with smoothed labels, which is cDPO."""
    names = [value] if isinstance(value, str) else list(value)
    if siblings.get("label_smoothing"):
        names = ["cdpo" if name == "sigmoid" else name for name in names]
    unknown = [name for name in names if name not in PREFERENCE_LOSSES]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not offered; choose among {', '.join(PREFERENCE_LOSSES)}")
    return {"preference.loss.loss_type": names[0] if len(names) == 1 else names}


# What these names mean when training is on fixed pairs.
PREFERENCE: dict[str, Rule] = {
    **dict(rules_of(load_yaml("trl.yaml")["preference"])),
    "loss_type": _preference_loss,
}
