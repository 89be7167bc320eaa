"""TRL: a `GRPOConfig` or `DPOConfig` as JSON, or the YAML of its command line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from grpo_fast.config.foreign.conversion import Algorithm, Conversion, Entry, convert_entries
from grpo_fast.config.foreign.names import DEFAULTS, NAMES, PREFERENCE, REWARDS, as_list
from grpo_fast.config.foreign.rules import Absent, NotApplicable, Places, Rule, Siblings, translate
from grpo_fast.config.rewards import BUILTINS
from grpo_fast.objective.comparisons import PREFERENCE_LOSSES

logger = logging.getLogger(__name__)
BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")
DPO_ONLY = ("precompute_ref_log_probs", "f_divergence_type", "truncation_mode", "ld_alpha")
TEXT_PROMPTS = Entry(
    "text prompts",
    "sent as they are",
    lambda *_: {"dataset.chat": "messages"},
    "TRL's default",
    missing=True,
)


def read_trl(document: Mapping[str, Any]) -> Conversion:
    """Convert a `GRPOConfig`, or a `DPOConfig`, which keys that only it has identify."""
    preference = "num_generations" not in document and any(key in document for key in DPO_ONLY)
    rules, notes = trl_rules(document, preference)
    entries = [Entry(key, value, rules.get(key), notes.get(key, "")) for key, value in document.items()]
    entries.append(TEXT_PROMPTS)
    siblings, defaults = {"use_peft": False, **document}, with_usual(DEFAULTS, document)
    algorithm: Algorithm = "dpo" if preference else "grpo"
    return convert_entries("TRL", entries, siblings, rules, defaults, algorithm=algorithm)


def with_usual(defaults: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's defaults, with those that depend on other keys."""
    usual = {"num_generations": 8, **defaults}
    if not any(document.get(key) for key in BATCH):
        usual["per_device_train_batch_size"] = 8
    if document.get("use_vllm"):
        usual["vllm_importance_sampling_correction"] = True
    if document.get("beta"):
        usual["use_bias_correction_kl"] = True
    # Ours are the papers'.
    clip = {
        "cispo": {"epsilon_high": document.get("epsilon", 0.2)},
        "luspo": {"epsilon": 0.2, "importance_sampling_level": "token"},
    }
    return usual | clip.get(str(document.get("loss_type")), {})


def trl_rules(document: Mapping[str, Any], preference: bool) -> tuple[dict[str, Rule], dict[str, str]]:
    """Return the rule of each of TRL's names in a document, and notes for some."""
    batch, note, per_rollout = _batch(document, preference)
    rules = NAMES | (PREFERENCE | {"loss_type": _preference_loss} if preference else {})
    rules |= dict.fromkeys(BATCH, batch)
    notes = dict.fromkeys(BATCH, note)
    names = [name for name in as_list(document.get("reward_funcs")) if name in REWARDS]
    packages = {REWARDS[name]["reward"].partition(".")[0] for name in names}
    if theirs := sorted(packages - BUILTINS.keys()):
        notes["reward_funcs"] = f"{' and '.join(theirs)} must be installed, and prompts be conversations"
    if per_rollout > 1:
        rules |= {key: partial(_in_rollouts, rules[key], per_rollout) for key in STEPS}
        notes |= dict.fromkeys(STEPS, f"a step here is a rollout, {per_rollout} optimizer steps there")
    return rules, notes


def whole_groups(document: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Return the batch sizes of all processes together, for at least one group in a step."""
    sizes = {key: document.get(key) for key in (*BATCH, "num_generations")}
    if any(size is not None and not isinstance(size, int) for size in sizes.values()):
        return {}  # refused by name
    rounds = sizes["steps_per_generation"] or sizes["gradient_accumulation_steps"] or 1
    batch = (sizes["per_device_train_batch_size"] or 8) * processes
    group = sizes["num_generations"] or 8
    if sizes["steps_per_generation"]:
        sizes["generation_batch_size"] = None  # TRL computes it
    if not sizes["generation_batch_size"] and batch * rounds < group:
        message = "per_device_train_batch_size: a step has %d completions, less than one group: it gets %d"
        logger.warning(message, batch * rounds, group)
        batch, sizes["steps_per_generation"], sizes["gradient_accumulation_steps"] = group, None, 1
    sizes["per_device_train_batch_size"] = batch
    return {key: sizes[key] for key in document.keys() & sizes.keys() | {"per_device_train_batch_size"}}


def _batch(document: Mapping[str, Any], preference: bool) -> tuple[Rule, str, int]:
    """Return the rule of TRL's four batch sizes, its note, and the optimizer steps of a rollout.

    On one process TRL generates `generation_batch_size` completions, by default per-device batch x
    steps_per_generation, and makes an optimizer step of every `gradient_accumulation_steps` batches of them.
    """
    given = {key: document[key] for key in BATCH if document.get(key)}
    group = 1 if preference else document.get("num_generations") or 8
    iterations = document.get("num_iterations") or 1
    if not all(isinstance(size, int) and size > 0 for size in (*given.values(), group, iterations)):
        return Absent("batch sizes are whole numbers above 0; set prompts_per_step", decide=True), "", 1
    batch = given.get("per_device_train_batch_size", 8)
    accumulation = given.get("gradient_accumulation_steps", 1)
    step = batch * accumulation
    per_generation = given.get("steps_per_generation", accumulation)
    rollout = given.get("generation_batch_size", batch * per_generation)
    note = f"as on one process: {rollout} completions a rollout, {group} a prompt, {step} a step"
    if rollout < group and "generation_batch_size" not in given:
        note, rollout, step = f"{rollout} completions are less than one group: it gets {group}", group, group
    prompts, minibatches = rollout // group, rollout // step
    if rollout % group or rollout % step or not 0 < minibatches <= prompts:
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
    """Translate a loss: TRL's names are ours, except that `sigmoid` with smoothed labels is cDPO."""
    names = as_list(value)
    if siblings.get("label_smoothing"):
        names = ["cdpo" if name == "sigmoid" else name for name in names]
    if unknown := [name for name in names if name not in PREFERENCE_LOSSES]:
        raise ValueError(f"{', '.join(unknown)} is not offered; choose among {', '.join(PREFERENCE_LOSSES)}")
    return {"preference.loss.loss_type": names[0] if len(names) == 1 else names}
