"""What may become of a foreign configuration key, and how values are put in our terms.

A translation gets the value and the keys beside it, and gives our dotted names with their values. It
raises ValueError, with the remedy, for a value without an equivalent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Places = dict[str, Any]  # dotted name here -> value
Translate = Callable[[Any, Mapping[str, Any]], Places]


@dataclass(frozen=True)
class Moved:
    """A foreign key with a place here.

    `translate(value, siblings)` gives no place at all when the value asks for what is so anyway.
    """

    translate: Translate
    places: tuple[str, ...]  # where it may end


@dataclass(frozen=True)
class Absent:
    """A foreign key without a place here, and what to do instead."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that ask for what is so anyway


Rule = Moved | Absent


def to(place: str) -> Moved:
    """The same value at another place; null leaves ours as it is."""

    def translate(value: Any, _: Mapping[str, Any]) -> Places:
        return {} if value is None else {place: value}

    return Moved(translate, (place,))


def choice(place: str, values: Mapping[Any, Any], otherwise: str) -> Moved:
    """A value from a list. `otherwise` explains the ones that are not on it; `...` sets nothing."""

    def translate(value: Any, _: Mapping[str, Any]) -> Places:
        try:
            known = value in values
        except TypeError:  # a list or a mapping is not hashable
            known = False
        if not known:
            raise ValueError(otherwise)
        return {} if values[value] is ... else {place: values[value]}

    return Moved(translate, (place,))


def steps(place: str, strategy: str) -> Moved:
    """An interval in steps, which HF's trainer reads only when the strategy beside it says `steps`."""

    def translate(value: Any, siblings: Mapping[str, Any]) -> Places:
        if value is None or siblings.get(strategy) in ("no", "epoch", False):
            return {}
        if isinstance(value, float) and value < 1:
            raise ValueError(f"a share of the run has no equivalent; give a number of steps in {place}")
        return {place: value}

    return Moved(translate, (place,))


def precision(value: Any, siblings: Mapping[str, Any]) -> Places:
    if value in (True, "auto", "full"):
        return {"model.dtype": "bfloat16"}
    return {} if value is None or siblings.get("fp16") else {"model.dtype": "float32"}


def half(value: Any, _: Mapping[str, Any]) -> Places:
    return {"model.dtype": "float16"} if value else {}


def dtype(value: Any, _: Mapping[str, Any]) -> Places:
    return {} if value in (None, "auto") else {"model.dtype": str(value).removeprefix("torch.")}


def betas(_: Any, siblings: Mapping[str, Any]) -> Places:
    return {"optimizer.betas": [siblings.get("adam_beta1", 0.9), siblings.get("adam_beta2", 0.999)]}


def grad_norm(value: Any, _: Mapping[str, Any]) -> Places:
    return {"optimizer.max_grad_norm": value or None}


def schedule_options(value: Any, siblings: Mapping[str, Any]) -> Places:
    value = dict(value or {})
    ratio = value.pop("min_lr_rate", None)
    floor = value.pop("min_lr", None)
    if value:
        raise ValueError(f"{', '.join(value)} has no equivalent; a schedule has warmup_steps and a floor")
    if floor is not None and "learning_rate" not in siblings:
        raise ValueError("min_lr is a rate and the floor here a ratio; set optimizer.min_learning_rate_ratio")
    if floor is not None:
        ratio = float(floor) / float(siblings["learning_rate"])
    return {} if ratio is None else {"optimizer.min_learning_rate_ratio": ratio}


TRACKERS = ("tensorboard", "wandb", "trackio")


def report_to(value: Any, _: Mapping[str, Any]) -> Places:
    asked = [value] if isinstance(value, str) or value is None else list(value)
    asked = TRACKERS if asked == ["all"] else [name for name in asked if name not in ("none", None)]
    unknown = [name for name in asked if name not in TRACKERS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not among the trackers here: {', '.join(TRACKERS)}")
    return {f"logging.{name}": name in asked for name in TRACKERS}


def reward_funcs(value: Any, siblings: Mapping[str, Any]) -> Places:
    names = [value] if isinstance(value, str) else list(value or [])
    weights = siblings.get("reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} reward_weights for {len(names)} reward_funcs; give one for each")
    return {
        "rewards": [{"reward": _import_path(n), "weight": w} for n, w in zip(names, weights, strict=True)]
    }


def _import_path(name: str) -> str:
    if "/" in name and ":" not in name and not name.endswith(".py"):
        raise ValueError(
            f"{name} names a reward model, and rewards here are functions; write one that asks the model and "
            "give its import path, `module:function`"
        )
    if ":" in name or "." not in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module}:{function}"


def reward_weights(value: Any, siblings: Mapping[str, Any]) -> Places:
    if value is not None and "reward_funcs" not in siblings:
        raise ValueError("goes with reward_funcs; beside `rewards` give each its own `weight`")
    return {}


MODEL_OPTIONS = {
    "attn_implementation": "model.attention",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
}
GENERATION_OPTIONS = {
    "max_new_tokens": "rollout.max_completion_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "stop": "rollout.stop",
}


def options(places: Mapping[str, str]) -> Moved:
    """A mapping of options, each with its own place."""

    def translate(value: Any, _: Mapping[str, Any]) -> Places:
        unknown = [key for key in value or {} if key not in places]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} has no place here; the options are {', '.join(places)}")
        return {places[key]: item for key, item in (value or {}).items()}

    return Moved(translate, tuple(dict.fromkeys(places.values())))


def top_k(value: Any, _: Mapping[str, Any]) -> Places:
    return {"rollout.top_k": 0 if value in (None, -1) else value}


def stop(value: Any, _: Mapping[str, Any]) -> Places:
    return {} if value is None else {"rollout.stop": [value] if isinstance(value, str) else list(value)}


def adapter(value: Any, _: Mapping[str, Any]) -> Places:
    if value in (None, "", False):
        return {"model.lora": None}
    if value in ("lora", True):
        return {"model.lora": {}}
    raise ValueError(f"{value} has no equivalent; adapters here are LoRA on weights of full precision")


def lora(key: str) -> Moved:
    """A setting of the adapter, which counts only when one is asked for."""

    def translate(value: Any, siblings: Mapping[str, Any]) -> Places:
        wanted = siblings.get("adapter", siblings.get("use_peft", True))
        return {f"model.lora.{key}": value} if wanted and value is not None else {}

    return Moved(translate, (f"model.lora.{key}",))


def all_linear(value: Any, _: Mapping[str, Any]) -> Places:
    return {"model.lora.target_modules": "all-linear"} if value else {}


def cpu(value: Any, _: Mapping[str, Any]) -> Places:
    return {"model.device": "cpu"} if value else {}


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


def max_steps(value: Any, _: Mapping[str, Any]) -> Places:
    return {} if value is None or value == -1 else {"max_steps": value}


def flash(value: Any, _: Mapping[str, Any]) -> Places:
    return {"model.attention": "flash_attention_2"} if value else {}


def sdpa(value: Any, _: Mapping[str, Any]) -> Places:
    return {"model.attention": "sdpa"} if value else {}


def correction(value: Any, siblings: Mapping[str, Any]) -> Places:
    if not value or not siblings.get("use_vllm", True):  # there it corrects vLLM only
        return {"loss.sampler_correction": "none"}
    return {"loss.sampler_correction": siblings.get("vllm_importance_sampling_mode") or "sequence_mask"}


def correction_mode(value: Any, siblings: Mapping[str, Any]) -> Places:
    if value is None or not siblings.get("vllm_importance_sampling_correction", True):
        return {}
    return {"loss.sampler_correction": value if siblings.get("use_vllm", True) else "none"}
