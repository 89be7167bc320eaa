"""The table of TRL's and Axolotl's names: the place of each one here, or why it has none.

`load_config` reads it for flat names in files and overrides, `grpo-fast convert` for whole files. `trl.yaml`
has the names whose value stays or is mapped; the functions here translate those that depend on other keys.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from grpo_fast.config.foreign.rules import (
    NOTHING,
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
from grpo_fast.config.tree import with_leaves

TRACKERS = ("tensorboard", "wandb", "trackio")


def as_list(value: Any) -> list[Any]:
    """Return one value or several as a list."""
    return [value] if isinstance(value, str) else list(value or [])


def steps(place: str, strategy: str, value: Any, siblings: Siblings) -> Places:
    """Translate an interval in steps; HF's trainer reads it only where its strategy is `steps`."""
    if siblings.get(strategy) in ("no", "epoch", False):
        return {}
    return translate(place, in_steps(value, siblings, place), {})


def in_steps(value: Any, siblings: Siblings, place: str) -> Any:
    """Return a number of steps; below 1 it is a share of the run, rounded up as HF's trainer does."""
    if value is None or not 0 < float(value) < 1:
        return value
    if int(siblings.get("max_steps") or -1) < 1:
        raise ValueError(f"a share of the run needs max_steps; set {place} as a number of steps")
    return math.ceil(float(value) * int(siblings["max_steps"]))


def warmup(value: Any, siblings: Siblings) -> Places:
    place = "optimizer.warmup_steps"
    if not value:
        return {}
    if float(value) < 1 and int(siblings.get("max_steps") or -1) < 1:
        return {place: value}  # of the steps that the epochs make
    steps = in_steps(value, siblings, place)
    # A share of few steps leaves one at the full rate.
    return {place: steps if steps == value else min(steps, int(siblings["max_steps"]) - 1)}


def push_to_hub(value: Any, siblings: Siblings) -> Places:
    if value and not siblings.get("hub_model_id"):
        raise NotApplicable("it names no repository; give hub.push as owner/name")
    return {}


def bf16(value: Any, siblings: Siblings) -> Places:
    if value in (True, "auto", "full"):
        return {"model.dtype": "bfloat16"}
    return {} if value is None or siblings.get("fp16") else {"model.dtype": "float32"}


def betas(prefix: str, _: Any, siblings: Siblings) -> Places:
    """Join Adam's two decays, one of which may be missing."""
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    return {"optimizer.betas": [siblings.get(f"{prefix}{key}", value) for key, value in usual.items()]}


def report_to(value: Any, _: Siblings) -> Places:
    asked = [name for name in as_list(value) if name not in ("none", "console", "file")]
    asked = list(TRACKERS) if asked == ["all"] else asked
    if unknown := [name for name in asked if name not in TRACKERS]:
        raise ValueError(f"{', '.join(unknown)} is no tracker here; choose among {', '.join(TRACKERS)}")
    return {f"logging.{name}": name in asked for name in TRACKERS}


def reward_funcs(value: Any, siblings: Siblings) -> Places:
    names = as_list(value)
    weights = siblings.get("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} reward_weights for {len(names)} reward_funcs; give one for each")
    pairs = zip(names, weights, strict=True)
    return {"rewards": [{**reward(name), "weight": weight} for name, weight in pairs]}


def reward(name: str) -> dict[str, Any]:
    """Return the entry of a reward: a published name by the table, else its import path."""
    if name.removeprefix("trl.rewards.") in REWARDS:
        return REWARDS[name.removeprefix("trl.rewards.")]
    is_model = "/" in name and ":" not in name and not name.endswith(".py")
    if is_model or (not set(name) & set("/:.") and name not in BUILTINS):
        what = "a reward model, and rewards here are functions" if is_model else "an unknown reward"
        raise ValueError(f"{name} is {what}; give a function's import path in `rewards`, `module:function`")
    return {"reward": import_path(name)}


def reward_weights(value: Any, siblings: Siblings) -> Places:
    if value is not None and "reward_funcs" not in siblings:
        raise ValueError("goes with reward_funcs; in `rewards` give each entry its own `weight`")
    return {}


def import_path(name: str) -> str:
    """Return `module.function` as `module:function`."""
    module, dot, function = name.rpartition(".")
    return name if ":" in name or not dot else f"{module}:{function}"


def correction(value: Any, siblings: Siblings) -> Places:
    """Translate the switch or the mode of TRL's correction, which is of vLLM's log-probabilities alone."""
    switch = siblings.get("vllm_importance_sampling_correction", True)
    if value is None or (isinstance(value, str) and not switch):
        return {}
    mode = siblings.get("vllm_importance_sampling_mode") or "sequence_mask"
    return {"loss.sampler_correction": mode if value and siblings.get("use_vllm", True) else "none"}


_TABLE = load_yaml("trl.yaml")
DEFAULTS: dict[str, Any] = _TABLE["defaults"]  # of missing keys, where ours differ
REWARDS: dict[str, dict[str, Any]] = _TABLE["rewards"]
WORDS: dict[str, list[str]] = _TABLE["words"]
PREFERENCE: dict[str, Rule] = dict(rules_of(_TABLE["preference"]))  # when training is on fixed pairs
MOVED: dict[str, Rule] = {
    **dict(rules_of(_TABLE["moved"])),
    "bf16": bf16,
    "push_to_hub": push_to_hub,
    "reward_funcs": reward_funcs,
    "reward_weights": reward_weights,
    "stop": lambda value, _: {"rollout.stop": as_list(value)} if value else {},
    **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"), correction),
    "tools": lambda value, _: {"rollout.tools": [*map(import_path, as_list(value))]} if value else {},
    "environment_factory": lambda value, _: (
        {"rollout.environment": with_leaves(value, import_path)} if value else {}
    ),
    # TRL counts rounds of calls, and a message of the model follows each.
    "max_tool_calling_iterations": lambda value, _: {} if value is None else {"rollout.max_turns": value + 1},
    **dict.fromkeys(("adam_beta1", "adam_beta2"), partial(betas, "")),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), warmup),
    "logging_steps": partial(steps, "logging.every", "logging_strategy"),
    "report_to": report_to,
    "save_steps": partial(steps, "checkpoint.every", "save_strategy"),
    "eval_steps": partial(steps, "evaluation.every", "eval_strategy"),
}
ABSENT = {
    key: Absent(entry["why"], NOTHING if harmless is None else harmless, entry.get("decide", False))
    for entry in _TABLE["absent"]
    for key, harmless in entry["keys"].items()
}
NAMES: dict[str, Rule] = {**MOVED, **ABSENT}
