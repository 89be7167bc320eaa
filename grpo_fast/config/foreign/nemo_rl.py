"""NeMo-RL: the YAML of a GRPO or DPO run, in its sections (`grpo:`, `loss_fn:`, ...) or one `algorithm:`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from grpo_fast.config.foreign.conversion import Algorithm, Conversion, Entry, convert_entries
from grpo_fast.config.foreign.names import NAMES, PREFERENCE, as_list, betas
from grpo_fast.config.foreign.rules import (
    Absent,
    NotApplicable,
    Places,
    Rule,
    Siblings,
    find_rule,
    load_yaml,
    rules_of,
    translate,
)
from grpo_fast.config.tree import flatten, value_at
from grpo_fast.objective.catalog import LOSS_TYPES
from grpo_fast.objective.comparisons import PREFERENCE_LOSSES

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MOST_REFERENCES = 10_000  # of a file, each counted as often as it is followed

# What a missing key means there, where ours would mean something else.
DEFAULTS = {"loss_fn.use_importance_sampling_correction": False}


class _OutsideError(Exception):
    """A reference leads out of the file."""


def read_nemo_rl(document: Mapping[str, Any]) -> Conversion:
    """Convert a document; every leaf is an entry, with references resolved."""
    leaves = _resolved(document)
    algorithm = _algorithm(leaves)
    flat_names = NAMES | (PREFERENCE if algorithm != "grpo" else {})
    siblings = dict(leaves)
    # A game makes its own rows and rewards; other environments are inherited defaults.
    games = sorted({key.split(".")[1] for key in leaves if key.startswith("env.")} - {*_SCORERS})
    entries: list[Entry] = []
    for key, value in leaves.items():
        known, leaf = key, key.removeprefix("algorithm.").removeprefix("training.")
        of_guide = f"tutorial.{leaf}" if algorithm == "rank" else f"guide.{leaf}"
        if (leaf != key or algorithm == "rank") and find_rule(of_guide, RULES):
            known = of_guide
        elif leaf not in (key, "name"):  # in the form of one section
            sections = ("dpo",) if algorithm == "dpo" else ("grpo", "loss_fn")
            known = next((name for s in sections if (name := f"{s}.{leaf}") in RULES), leaf)
        siblings[known] = value
        rule = find_rule(known, RULES)
        rule = flat_names.get(leaf) if rule is None and (leaf != key or algorithm == "rank") else rule
        if games and key.startswith(("env.", "data.")):
            is_game = key.split(".")[1] in games
            rule = _GAME if is_game else Absent(f"{games[0]} is in its place")
        if key.startswith(_OFF[bool(leaves.get(f"{_MEGATRON}.enabled"))]) and not key.endswith(".enabled"):
            rule = Absent("belongs to the backend that is off")
        entries.append(Entry(key, value, rule))
    # Keys of this section decide together on the loss.
    entries.sort(key=lambda entry: not entry.key.startswith("loss_fn."))
    return convert_entries("NeMo-RL", entries, siblings, RULES, DEFAULTS, algorithm=algorithm)


def _algorithm(leaves: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm; a file of the tutorial on ranked groups does not name it."""
    sections = {key.partition(".")[0] for key in leaves}
    name = str(leaves.get("algorithm.name", leaves.get("algorithm", "")))
    if name in ("dpo", "custom_dpo") or (not name and "dpo" in sections):
        return "dpo"
    ranked = {"training", "group_size", "model"} & sections or {"data.train_file"} & leaves.keys()
    return "rank" if ranked and not {"algorithm", "grpo", "policy"} & sections else "grpo"


def with_defaults(path: Path, read: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a file's document over the files next to it that its `defaults:` names.

    Raises:
        ValueError: a file is among its own defaults.
    """
    known: dict[Path, dict[str, Any] | None] = {}  # None: its defaults are being read

    def whole(path: Path) -> dict[str, Any]:
        path = path.resolve()
        if path in known and known[path] is None:
            raise ValueError(f"defaults: {path.name} is among its own defaults; leave one of them out")
        if (found := known.get(path)) is None:
            known[path], document = None, read(path)
            names = [str(name) for name in as_list(document.get("defaults"))]
            found = dict(document)  # Hydra's defaults name no files
            if names and all(name.endswith((".yaml", ".yml")) for name in names):
                own = {key: value for key, value in document.items() if key != "defaults"}
                below = [whole(path.parent / name) for name in dict.fromkeys(names)]
                found = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(*below, own)))
            known[path] = found
        return found

    return whole(path)


def _resolved(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves with `${...}` and `${mul:...}` filled in; what leads out of the file stays.

    Raises:
        ValueError: references lead back to themselves, or are too many once they are followed.
    """
    count = 0

    def followed(reference: str, place: str, path: tuple[str, ...]) -> Any:
        nonlocal count
        count += 1
        factors = reference.removeprefix("mul:").replace(" ", "").split(",")
        if factors != [reference] and all(factor.isdigit() for factor in factors):
            return prod(map(int, factors))
        name = reference.lstrip(".")
        above = place.split(".")[: len(name) - len(reference)] if name != reference else []
        target = ".".join([*above, name]).replace("[", ".").replace("]", "")
        if target == place or (value := value_at(document, target)) is None:
            raise _OutsideError
        if target in path or count > MOST_REFERENCES:
            many = "lead back to themselves" if target in path else f"are more than {MOST_REFERENCES:,}"
            raise ValueError(f"{path[0]}: references, once followed, {many}; write the value in their place")
        return resolved(value, target, (*path, target))

    def resolved(value: Any, place: str, path: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [resolved(item, f"{place}.{index}", path) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {key: resolved(item, f"{place}.{key}", path) for key, item in value.items()}
        while isinstance(value, str) and (found := _REFERENCE.search(value)):
            part = followed(found[1], place, path)
            value = part if found[0] == value else value.replace(found[0], str(part), 1)
        return value

    leaves = flatten(document)
    for place, value in leaves.items():
        try:
            with suppress(_OutsideError):
                leaves[place] = resolved(value, place, (place,))
        except RecursionError:
            raise ValueError(
                f"{place}: references are nested too deeply; write the value in its place"
            ) from None
    return leaves


def loss_type(value: Any, leaves: Siblings) -> Places:
    if leaves.get("loss_fn.use_cispo"):
        return {"loss.loss_type": "cispo"}
    if leaves.get("loss_fn.disable_ppo_ratio"):
        raise ValueError("REINFORCE normalizes otherwise; choose loss.loss_type gpg, rloo or reinforce")
    return {"loss.loss_type": "dapo" if value else "grpo"}


def clip(end: str, value: Any, leaves: Siblings) -> Places:
    """Translate a bound of the ratio; CISPO's are distances from 1 there, an absolute ceiling here."""
    if value is None or not leaves.get("loss_fn.use_cispo"):
        return {} if value is None else {f"loss.epsilon_{end}": value}
    if end == "low" and value < 1:
        raise ValueError("CISPO's weight has no floor here; set 1 or more for none")
    return {"loss.epsilon_high": 1 + value} if end == "high" else {}


def sampler_correction(value: Any, leaves: Siblings) -> Places:
    if not value:
        return {"loss.sampler_correction": "none"}
    bounded = leaves.get("loss_fn.truncated_importance_sampling_ratio")
    kind = leaves.get("loss_fn.truncated_importance_sampling_type") or ("tis" if bounded else "")
    modes = {"tis": "token_truncate", "icepop": "token_mask"}
    if kind not in modes:
        raise ValueError("a correction without bounds, or by sequence and token at once, is not offered")
    return {"loss.sampler_correction": modes[kind]}


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
    """Translate a chain of torch schedulers: a linear warmup, then constant or cosine."""
    places: Places = {}
    stages = [stage for stage in value or [] if "name" in stage]
    names = [stage["name"].rpartition(".")[2] for stage in stages]
    if names and names[0] == "LinearLR" and stages[0]["kwargs"].get("start_factor", 1) < 1:
        places["optimizer.warmup_steps"] = stages.pop(0)["kwargs"]["total_iters"]
        names.pop(0)
    if names not in ([], ["ConstantLR"], ["CosineAnnealingLR"]):
        raise ValueError("is another schedule; optimizer.schedule is constant or cosine, with warmup_steps")
    cosine = names == ["CosineAnnealingLR"]
    rate, floor = leaves.get("policy.optimizer.kwargs.lr"), cosine and stages[0]["kwargs"].get("eta_min")
    if rate and floor:
        places["optimizer.min_learning_rate_ratio"] = floor / rate
    return {**places, "optimizer.schedule": "cosine" if cosine else "constant"}


def similarity_threshold(value: Any, leaves: Siblings) -> Places:
    if (strategy := leaves.get("guide.group_strategy")) in ("random", "performance"):
        raise NotApplicable(f"{strategy} groups have no threshold")
    return translate("groups.similarity_threshold", value, leaves)


def custom_loss(value: Any, leaves: Siblings) -> Places:
    """Take one of our losses, or a function; another name's code is not in the file."""
    preference = _algorithm(leaves) == "dpo"
    known = PREFERENCE_LOSSES if preference else LOSS_TYPES
    if value is None or value in known or ":" in str(value):
        return {} if value is None else {f"{'preference.' * preference}loss.loss_type": value}
    key = f"{'preference.' * preference}loss.loss_type"
    raise ValueError(f"its code is not in this file: set {key} to module:function")


def each(places: tuple[str, ...], value: Any, _: Siblings) -> Places:
    """Set several of our keys to one value."""
    return {} if value is None else dict.fromkeys(places, value)


def answer_column(value: Any, _: Siblings) -> Places:
    return {"dataset.rename": {value: "answer"}} if value != "answer" else {}


# Sections of `env` that score answers; `env_name` says which does.
_SCORERS = ("math", "dapo", "code", "code_jaccard", "reward_model", "math_multi_reward")
_GAME = Absent(
    "is NeMo-RL's environment; write its class for rollout.environment, and its rows as a file",
    decide=True,
)
_LORA = "policy.dtensor_cfg.lora_cfg"
_LENGTHS = ("dataset.max_prompt_length", "preference.max_completion_length")
_MEGATRON = "policy.megatron_cfg"
# What does not count with Megatron, and without.
_OFF = {True: ("policy.optimizer.", "policy.scheduler", "policy.dtensor_cfg."), False: (f"{_MEGATRON}.",)}
RULES: dict[str, Rule] = {
    **dict(rules_of(load_yaml("nemo_rl.yaml"))),
    **dict.fromkeys(("data.output_key", "data.train.output_key"), answer_column),
    "guide.clip_ratio": partial(each, ("loss.epsilon_low", "loss.epsilon_high")),
    "guide.grouping.similarity_threshold": similarity_threshold,
    "guide.loss.type": custom_loss,
    **dict.fromkeys(("tutorial.model.max_length", "tutorial.data.max_seq_length"), partial(each, _LENGTHS)),
    "loss_fn.ratio_clip_max": partial(clip, "high"),
    "loss_fn.ratio_clip_min": partial(clip, "low"),
    "loss_fn.token_level_loss": loss_type,
    "loss_fn.use_importance_sampling_correction": sampler_correction,
    f"{_LORA}.target_modules": lora_targets,
    **{
        f"{_MEGATRON}.optimizer.{key}": partial(betas, f"{_MEGATRON}.optimizer.")
        for key in ("adam_beta1", "adam_beta2")
    },
    "policy.generation.stop_strings": NAMES["stop"],
    "policy.generation.top_k": NAMES["top_k"],
    "policy.scheduler": scheduler,
    "policy.train_global_batch_size": minibatches,
}
