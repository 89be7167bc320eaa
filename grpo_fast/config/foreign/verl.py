"""verl: the overrides of a run's command, or its configuration in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from grpo_fast.config.foreign.conversion import Conversion, Entry, convert_entries, default_entries
from grpo_fast.config.foreign.names import clip, in_steps, report_to, tool_rounds
from grpo_fast.config.foreign.references import resolve
from grpo_fast.config.foreign.rules import (
    NotApplicable,
    Places,
    Rule,
    Siblings,
    find_rule,
    load_yaml,
    rules_of,
)
from grpo_fast.config.tree import flatten
from grpo_fast.objective.catalog import CATALOG

ACTOR = "actor_rollout_ref.actor"
MODE, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
# verl's name for how a loss is averaged -> ours, and the loss that is so averaged in its `vanilla` mode.
AGGREGATIONS = {
    "token-mean": ("token_mean", "dapo"),
    "seq-mean-token-mean": ("sequence_mean", "grpo"),
    "seq-mean-token-sum": ("sequence_sum", "grpo"),
    "seq-mean-token-sum-norm": ("constant_length", "dr_grpo"),
}


def read_verl(document: Mapping[str, Any]) -> Conversion:
    """Every leaf is an entry, references resolved."""
    leaves = resolve(flatten(document))
    entries = [Entry(key, value, find_rule(key, RULES)) for key, value in leaves.items()]
    entries += default_entries("verl", DEFAULTS, leaves, RULES)
    entries.sort(key=lambda entry: entry.key not in (MODE, AGGREGATION))
    return convert_entries("verl", entries, DEFAULTS | leaves, preference=False)


def loss_type(_: Any, leaves: Siblings) -> Places:
    """The loss that verl's mode and aggregation make together."""
    mode, averaged = leaves.get(MODE, "vanilla"), leaves.get(AGGREGATION, "token-mean")
    ours, vanilla = AGGREGATIONS.get(str(averaged), ("", ""))
    name = vanilla if mode == "vanilla" else {"geo_mean": "gmpo"}.get(mode, str(mode))
    name = name.removeprefix("grpo_fast_")
    if name not in CATALOG or not ours:
        raise ValueError(f"{mode} averaged by {averaged} is no loss here; see loss.loss_type and aggregation")
    places: Places = {"loss.loss_type": name}
    if ours != CATALOG[name].aggregation and mode not in ("gspo", "geo_mean"):  # whose way is their own there
        places["loss.aggregation"] = ours
    if ours == "constant_length":
        length = leaves.get(f"{ACTOR}.loss_scale_factor") or leaves.get("data.max_response_length")
        places["loss.max_completion_length"] = length
    return places


def clip_ratio(value: Any, leaves: Siblings) -> Places:
    given = {end: leaves.get(f"{ACTOR}.clip_ratio_{end}") for end in ("low", "high")}
    missing = [end for end in given if given[end] is None]
    if not missing and value != 0.2 and given == {"low": 0.2, "high": 0.2}:
        raise ValueError("verl reads clip_ratio_low and _high, 0.2 where missing; see loss.epsilon_low")
    if not missing:
        raise NotApplicable("clip_ratio_low and clip_ratio_high decide")
    return {f"loss.epsilon_{end}": value for end in missing}


def ratio_ceiling(value: Any, leaves: Siblings) -> Places:
    mode = leaves.get(MODE, "vanilla")
    if mode != "vanilla" and not mode.startswith("dppo_"):
        raise NotApplicable(f"{mode} does not read it")
    return {"loss.delta" if mode == "vanilla" else "loss.dppo_ratio_max": value}


def minibatches(value: Any, leaves: Siblings) -> Places:
    prompts = leaves.get("data.train_batch_size")
    if not isinstance(prompts, int) or prompts % value:
        raise ValueError(f"does not divide data.train_batch_size = {prompts}; set minibatches")
    return {"minibatches": prompts // value}


def one_file(prefix: str, value: Any, leaves: Siblings) -> Places:
    files = [value] if isinstance(value, str) else list(value or [])
    if len(files) != 1:
        raise ValueError("a run has one dataset; join the files, or pick one")
    column = {f"{prefix}prompt_column": leaves["data.prompt_key"]} if "data.prompt_key" in leaves else {}
    return {f"{prefix}source": files[0], **column}


def warmup(value: Any, leaves: Siblings) -> Places:
    if not value or (leaves.get(f"{ACTOR}.optim.lr_warmup_steps") or -1) >= 0:
        return {}
    place = "optimizer.warmup_steps"
    return {place: in_steps(value, {"max_steps": leaves.get("trainer.total_training_steps")}, place)}


_TABLE = load_yaml("verl.yaml")
DEFAULTS: dict[str, Any] = _TABLE.pop("_defaults")
RULES: dict[str, Rule] = {
    **dict(rules_of(_TABLE)),
    MODE: loss_type,
    AGGREGATION: loss_type,
    f"{ACTOR}.clip_ratio": clip_ratio,
    f"{ACTOR}.clip_ratio_c": ratio_ceiling,
    f"{ACTOR}.clip_ratio_high": partial(clip, "high", MODE, "cispo"),
    f"{ACTOR}.clip_ratio_low": partial(clip, "low", MODE, "cispo"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": warmup,
    f"{ACTOR}.ppo_mini_batch_size": minibatches,
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": tool_rounds,
    "data.train_files": partial(one_file, "dataset."),
    "data.val_files": partial(one_file, "evaluation.dataset."),
    "trainer.logger": report_to,
}
