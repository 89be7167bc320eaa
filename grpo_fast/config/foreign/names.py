"""The one table of names that people know from TRL and Axolotl: each one's place here, or why it has none.

`load_config` reads it for flat names in files and overrides, `grpo-fast convert` for whole files. What only
changes its name or its values and what has no place is in `trl.yaml`; what depends on other keys is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from grpo_fast.config.policy import LoraConfig
from grpo_fast.config.rewards import BUILTINS

TRACKERS = ("tensorboard", "wandb", "trackio")


def options(places: Mapping[str, str], value: Any, _: Siblings) -> Places:
    """A mapping of options, each with its own place."""
    unknown = [key for key in value or {} if key not in places]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} has no place here; the options are {', '.join(places)}")
    return {places[key]: item for key, item in (value or {}).items()}


def steps(place: str, strategy: str, value: Any, siblings: Siblings) -> Places:
    """An interval in steps, which HF's trainer reads only when the strategy beside it says `steps`."""
    if siblings.get(strategy) in ("no", "epoch", False):
        return {}
    return translate(place, in_steps(value, siblings, place), {})


def in_steps(value: Any, siblings: Siblings, place: str) -> Any:
    """A number of steps; below 1 it is a share of the run, rounded up as HF's trainer does."""
    if value is None or not 0 < float(value) < 1:
        return value
    if int(siblings.get("max_steps") or -1) < 1:
        raise ValueError(f"a share of the run needs max_steps beside it; set {place} as a number of steps")
    return math.ceil(float(value) * int(siblings["max_steps"]))


def lora(key: str, value: Any, siblings: Siblings) -> Places:
    """A setting of the adapter, which counts only when one is asked for."""
    if not siblings.get("adapter", siblings.get("use_peft", True)):
        raise NotApplicable("counts only with an adapter, which is not asked for")
    return translate(f"model.lora.{key}", value, {})


def hub(key: str, value: Any, siblings: Siblings) -> Places:
    """Where the model is pushed to, which counts only when it is."""
    return translate(f"hub.{key}", value, {}) if siblings.get("push_to_hub", True) else {}


def push_to_hub(value: Any, siblings: Siblings) -> Places:
    if value and not siblings.get("hub_model_id"):
        raise NotApplicable("it names no repository; give hub.push as owner/name")
    return {}


def bf16(value: Any, siblings: Siblings) -> Places:
    if value in (True, "auto", "full"):
        return {"model.dtype": "bfloat16"}
    return {} if value is None or siblings.get("fp16") else {"model.dtype": "float32"}


def clip(end: str, key: str, cispo: Any, value: Any, siblings: Siblings) -> Places:
    """A bound of the ratio, which NeMo-RL and verl write as a distance from 1 for CISPO too.

    CISPO's weight lies within [1 - low, 1 + high] there; here it has a ceiling alone, as an absolute number.
    """
    if value is None or siblings.get(key) != cispo:
        return translate(f"loss.epsilon_{end}", value, {})
    if end == "low" and value < 1:
        raise ValueError("the weight of CISPO has no floor here; 1 or more asks for none")
    return {"loss.epsilon_high": 1 + value} if end == "high" else {}


def stop(value: Any, _: Siblings) -> Places:
    return {"rollout.stop": [value] if isinstance(value, str) else list(value)} if value else {}


def betas(prefix: str, _: Any, siblings: Siblings) -> Places:
    """Adam's two, of which one may be missing."""
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    return {"optimizer.betas": [siblings.get(f"{prefix}{key}", value) for key, value in usual.items()]}


def warmup(value: Any, siblings: Siblings) -> Places:
    place = "optimizer.warmup_steps"
    if not value:
        return {}
    steps = in_steps(value, siblings, place)
    # A share of few steps leaves one at the full rate.
    return {place: steps if steps == value else min(steps, int(siblings["max_steps"]) - 1)}


def schedule_options(value: Any, siblings: Siblings) -> Places:
    left = dict(value or {})
    ratio, floor = left.pop("min_lr_rate", None), left.pop("min_lr", None)
    if left:
        raise ValueError(f"{', '.join(left)} has no equivalent; a schedule has warmup_steps and a floor")
    if floor is not None:
        if "learning_rate" not in siblings:
            raise ValueError(
                "min_lr is a rate and the floor here a ratio; set optimizer.min_learning_rate_ratio"
            )
        ratio = float(floor) / float(siblings["learning_rate"])
    return translate("optimizer.min_learning_rate_ratio", ratio, {})


def report_to(value: Any, _: Siblings) -> Places:
    asked = [value] if isinstance(value, str) else list(value or ())
    asked = [name for name in asked if name not in ("none", "console", "file")]
    asked = list(TRACKERS) if asked == ["all"] else asked
    if unknown := [name for name in asked if name not in TRACKERS]:
        raise ValueError(f"{', '.join(unknown)} is not among the trackers here: {', '.join(TRACKERS)}")
    return {f"logging.{name}": name in asked for name in TRACKERS}


def reward_funcs(value: Any, siblings: Siblings) -> Places:
    names = [value] if isinstance(value, str) else list(value or [])
    weights = siblings.get("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} reward_weights for {len(names)} reward_funcs; give one for each")
    pairs = zip(names, weights, strict=True)
    return {"rewards": [{**reward(name), "weight": weight} for name, weight in pairs]}


def reward(name: str) -> dict[str, Any]:
    """A published name by the table; `module.function` as `module:function`; ours and a file's stay."""
    if name.removeprefix("trl.rewards.") in REWARDS:
        return REWARDS[name.removeprefix("trl.rewards.")]
    if not set(name) & set("/:.") and name not in BUILTINS:
        raise ValueError(
            f"{name} is no reward here and none that this converter knows; give its import path in "
            "`rewards`, `module:function`"
        )
    if "/" in name and ":" not in name and not name.endswith(".py"):
        raise ValueError(
            f"{name} names a reward model, and rewards here are functions; write one that asks the model and "
            "give its import path, `module:function`"
        )
    return {"reward": import_path(name)}


def import_path(name: str) -> str:
    """`module.function` as `module:function`."""
    module, dot, function = name.rpartition(".")
    return name if ":" in name or not dot else f"{module}:{function}"


def tools(value: Any, _: Siblings) -> Places:
    names = [value] if isinstance(value, str) else value or []
    return {"rollout.tools": [import_path(name) for name in names]} if names else {}


def environment_factory(value: Any, _: Siblings) -> Places:
    if isinstance(value, Mapping):
        value = {name: import_path(factory) for name, factory in value.items()}
    return {"rollout.environment": import_path(value) if isinstance(value, str) else value} if value else {}


def tool_rounds(value: Any, _: Siblings) -> Places:
    """TRL counts rounds of calls, and a message of the model follows each."""
    return {} if value is None else {"rollout.max_turns": value + 1}


def reward_weights(value: Any, siblings: Siblings) -> Places:
    if value is not None and "reward_funcs" not in siblings:
        raise ValueError("goes with reward_funcs; beside `rewards` give each its own `weight`")
    return {}


def correction(value: Any, siblings: Siblings) -> Places:
    """TRL's correction is of vLLM's log-probabilities only."""
    on = value and siblings.get("use_vllm", True)
    mode = siblings.get("vllm_importance_sampling_mode") or "sequence_mask"
    return {"loss.sampler_correction": mode if on else "none"}


def correction_mode(value: Any, siblings: Siblings) -> Places:
    if value is None or not siblings.get("vllm_importance_sampling_correction", True):
        return {}
    return correction(True, siblings)


_TABLE = load_yaml("trl.yaml")
REWARDS: dict[str, dict[str, Any]] = _TABLE["rewards"]
MOVED: dict[str, Rule] = {
    **dict(rules_of(_TABLE["moved"])),
    "model_init_kwargs": partial(options, _TABLE["model_init_kwargs"]),
    "generation_kwargs": partial(options, _TABLE["generation_kwargs"]),
    "bf16": bf16,
    "hub_model_id": partial(hub, "push"),
    "hub_private_repo": partial(hub, "private"),
    "push_to_hub": push_to_hub,
    **{f"lora_{key}": partial(lora, key) for key in LoraConfig.model_fields},
    "reward_funcs": reward_funcs,
    "reward_weights": reward_weights,
    "stop": stop,
    "vllm_importance_sampling_correction": correction,
    "vllm_importance_sampling_mode": correction_mode,
    "tools": tools,
    "environment_factory": environment_factory,
    "max_tool_calling_iterations": tool_rounds,
    **dict.fromkeys(("adam_beta1", "adam_beta2"), partial(betas, "")),
    "lr_scheduler_kwargs": schedule_options,
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
