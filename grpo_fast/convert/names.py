"""The one table of names that people know from TRL and Axolotl: each one's place here, or why it has none.

`load_config` reads it for flat names in files and overrides, `grpo-fast convert` for whole files. What only
changes its name and what has no place is in `trl.yaml`; what needs a translation is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.convert.references import flatten


@dataclass(frozen=True)
class Absent:
    """A foreign key without a place here, and what to do instead."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that ask for what is so anyway


Places = dict[str, Any]  # dotted name here -> value
# A function gets the value and the keys beside it. It gives no place when the value asks for what is so
# anyway, and raises ValueError, with the remedy, for a value without an equivalent.
Translate = Callable[[Any, Mapping[str, Any]], Places]
Rule = str | Translate | Absent  # a string is a place: the value stays, null sets nothing

TRACKERS = ("tensorboard", "wandb", "trackio")


def translate(rule: Rule, value: Any, siblings: Mapping[str, Any]) -> Places:
    """Our names and values for a foreign one.

    Raises:
        ValueError: the key or its value has no place here; the message says why, or what to do instead.
    """
    if isinstance(rule, str):
        return {} if value is None else {rule: value}
    if not isinstance(rule, Absent):
        return rule(value, siblings)
    if value in rule.harmless:
        return {}
    raise ValueError(f"has no place here: {rule.reason}")


def load_yaml(name: str) -> dict[str, Any]:
    """A table that lies beside this file."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def load_rules(name: str) -> dict[str, Rule]:
    """Rules by dotted name from a table of our names and reasons in brackets."""
    leaves = flatten(load_yaml(name))
    return {key: Absent(text[1:-1]) if text.startswith("(") else text for key, text in leaves.items()}


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule of a key, or the reason of the part that it belongs to, by the longest name that fits."""
    if key in rules:
        return rules[key]
    absent = [name for name, rule in rules.items() if isinstance(rule, Absent)]
    fitting = [
        name for name in absent if key.startswith(name.removesuffix("*") if "*" in name else f"{name}.")
    ]
    return rules[max(fitting, key=len)] if fitting else None


def mapped(place: str, values: Mapping[Any, Any], otherwise: str = "") -> Translate:
    """Values that are written differently here; `...` sets nothing.

    Others stay as they are, or are refused with the reason `otherwise`.
    """

    def rule(value: Any, _: Mapping[str, Any]) -> Places:
        for known, ours in values.items():
            if value == known:
                return {} if ours is ... else {place: ours}
        if otherwise:
            raise ValueError(otherwise)
        return translate(place, value, {})

    return rule


def when(place: str, ours: Any) -> Translate:
    """A switch that chooses one value of ours, or none."""
    return lambda value, _: {place: ours} if value else {}


def refused(reason: str) -> Translate:
    """A switch that may only be off."""

    def rule(value: Any, _: Mapping[str, Any]) -> Places:
        if value:
            raise ValueError(reason)
        return {}

    return rule


def options(places: Mapping[str, str]) -> Translate:
    """A mapping of options, each with its own place."""

    def rule(value: Any, _: Mapping[str, Any]) -> Places:
        unknown = [key for key in value or {} if key not in places]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} has no place here; the options are {', '.join(places)}")
        return {places[key]: item for key, item in (value or {}).items()}

    return rule


def steps(place: str, strategy: str) -> Translate:
    """An interval in steps, which HF's trainer reads only when the strategy beside it says `steps`."""

    def rule(value: Any, siblings: Mapping[str, Any]) -> Places:
        if siblings.get(strategy) in ("no", "epoch", False):
            return {}
        if isinstance(value, float) and value < 1:
            raise ValueError(f"a share of the run has no equivalent; give a number of steps in {place}")
        return translate(place, value, {})

    return rule


def lora(key: str) -> Translate:
    """A setting of the adapter, which counts only when one is asked for."""

    def rule(value: Any, siblings: Mapping[str, Any]) -> Places:
        wanted = siblings.get("adapter", siblings.get("use_peft", True))
        return translate(f"model.lora.{key}", value, {}) if wanted else {}

    return rule


def dtype(value: Any, _: Mapping[str, Any]) -> Places:
    return {} if value in (None, "auto") else {"model.dtype": str(value).removeprefix("torch.")}


def bf16(value: Any, siblings: Mapping[str, Any]) -> Places:
    if value in (True, "auto", "full"):
        return {"model.dtype": "bfloat16"}
    return {} if value is None or siblings.get("fp16") else {"model.dtype": "float32"}


def stop(value: Any, _: Mapping[str, Any]) -> Places:
    return {"rollout.stop": [value] if isinstance(value, str) else list(value)} if value else {}


def betas(_: Any, siblings: Mapping[str, Any]) -> Places:
    return {"optimizer.betas": [siblings.get("adam_beta1", 0.9), siblings.get("adam_beta2", 0.999)]}


def warmup(value: Any, siblings: Mapping[str, Any]) -> Places:
    if not value:
        return {}
    if float(value) >= 1:
        return {"optimizer.warmup_steps": value}
    if int(siblings.get("max_steps") or -1) < 1:
        raise ValueError(
            "a share needs max_steps beside it; give optimizer.warmup_steps as a number of steps"
        )
    return {"optimizer.warmup_steps": round(float(value) * int(siblings["max_steps"]))}


def schedule_options(value: Any, siblings: Mapping[str, Any]) -> Places:
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


def report_to(value: Any, _: Mapping[str, Any]) -> Places:
    asked = [name for name in ([value] if isinstance(value, str) else value or ()) if name != "none"]
    if asked == ["all"]:
        asked = list(TRACKERS)
    unknown = [name for name in asked if name not in TRACKERS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not among the trackers here: {', '.join(TRACKERS)}")
    return {f"logging.{name}": name in asked for name in TRACKERS}


def reward_funcs(value: Any, siblings: Mapping[str, Any]) -> Places:
    names = [value] if isinstance(value, str) else list(value or [])
    weights = siblings.get("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} reward_weights for {len(names)} reward_funcs; give one for each")
    pairs = zip(names, weights, strict=True)
    return {"rewards": [{"reward": reward_path(name), "weight": weight} for name, weight in pairs]}


def reward_path(name: str) -> str:
    """`module.function` as `module:function`; a name of a built-in reward or a file stays."""
    if "/" in name and ":" not in name and not name.endswith(".py"):
        raise ValueError(
            f"{name} names a reward model, and rewards here are functions; write one that asks the model and "
            "give its import path, `module:function`"
        )
    module, dot, function = name.rpartition(".")
    return name if ":" in name or not dot else f"{module}:{function}"


def reward_weights(value: Any, siblings: Mapping[str, Any]) -> Places:
    if value is not None and "reward_funcs" not in siblings:
        raise ValueError("goes with reward_funcs; beside `rewards` give each its own `weight`")
    return {}


def correction(value: Any, siblings: Mapping[str, Any]) -> Places:
    """TRL's correction is of vLLM's log-probabilities only."""
    on = value and siblings.get("use_vllm", True)
    mode = siblings.get("vllm_importance_sampling_mode") or "sequence_mask"
    return {"loss.sampler_correction": mode if on else "none"}


def correction_mode(value: Any, siblings: Mapping[str, Any]) -> Places:
    if value is None or not siblings.get("vllm_importance_sampling_correction", True):
        return {}
    return correction(True, siblings)


_MODEL_OPTIONS = {
    "attn_implementation": "model.attention",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
}
_GENERATION_OPTIONS = {"max_new_tokens": "rollout.max_completion_length"} | {
    key: f"rollout.{key}" for key in ("temperature", "top_p", "top_k", "min_p", "stop")
}
_SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}
_SCHEDULE = mapped(
    "optimizer.schedule",
    {**_SCHEDULES, "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    "has no equivalent; optimizer.schedule is constant, linear or cosine",
)

TRANSLATED: dict[str, Translate] = {
    "flash_attention": when("model.attention", "flash_attention_2"),
    "sdp_attention": when("model.attention", "sdpa"),
    "model_init_kwargs": options(_MODEL_OPTIONS),
    "dtype": dtype,
    "torch_dtype": dtype,
    "bf16": bf16,
    "fp16": when("model.dtype", "float16"),
    "use_cpu": when("model.device", "cpu"),
    **dict.fromkeys(
        ("use_peft", "adapter"),
        mapped(
            "model.lora",
            {None: None, "": None, False: None, "lora": {}, True: {}},
            "has no equivalent; adapters here are LoRA on weights of full precision",
        ),
    ),
    "lora_r": lora("r"),
    "lora_alpha": lora("alpha"),
    "lora_dropout": lora("dropout"),
    "lora_target_modules": lora("target_modules"),
    "lora_target_linear": when("model.lora.target_modules", "all-linear"),
    "reward_funcs": reward_funcs,
    "reward_weights": reward_weights,
    "top_k": mapped("rollout.top_k", {None: 0, -1: 0}),
    "stop": stop,
    "generation_kwargs": options(_GENERATION_OPTIONS),
    "use_vllm": mapped(
        "rollout.engine", {True: "vllm", False: "transformers", None: ...}, "is not a boolean"
    ),
    "scale_rewards": mapped(
        "advantage.scale_rewards",
        {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"},
        "has no equivalent; it is group, batch or none",
    ),
    "rl": mapped("algorithm", {"grpo": "grpo"}, "has no equivalent; the algorithm here is grpo"),
    "vllm_importance_sampling_correction": correction,
    "vllm_importance_sampling_mode": correction_mode,
    "max_steps": mapped("max_steps", {-1: ...}),
    "max_grad_norm": mapped("optimizer.max_grad_norm", {0: None, None: None}),
    "adam_beta1": betas,
    "adam_beta2": betas,
    "optim": mapped(
        "optimizer",
        dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw", "adamw_hf", None), ...),
        "has no equivalent; the optimiser here is AdamW",
    ),
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_kwargs": schedule_options,
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "logging_steps": steps("logging.every", "logging_strategy"),
    "report_to": report_to,
    "save_steps": steps("checkpoint.every", "save_strategy"),
    "eval_steps": steps("evaluation.every", "eval_strategy"),
}

_TABLE = load_yaml("trl.yaml")
_NOTHING: tuple[Any, ...] = (None, False, "", [])
MOVED: dict[str, str | Translate] = {**_TABLE["moved"], **TRANSLATED}
ABSENT = {
    key: Absent(entry["why"], _NOTHING if harmless is None else tuple(harmless))
    for entry in _TABLE["absent"]
    for key, harmless in entry["keys"].items()
}
NAMES: dict[str, Rule] = {**MOVED, **ABSENT}
