"""Translate the arguments of TRL's GRPOTrainer to those of `grpo_fast.train`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from grpo_fast.config.convert import fitted
from grpo_fast.config.foreign.rules import Places
from grpo_fast.config.foreign.trl import BATCH, read_trl, whole_groups
from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.tree import with_leaves

logger = logging.getLogger(__name__)
# Read even where they are TRL's defaults, since ours may differ.
ALWAYS = (*BATCH, "num_generations", "output_dir", "seed", "use_cpu", "save_steps", "bnb_4bit_quant_type")
ARGUMENTS = ("reward_funcs", "reward_processing_classes", "optimizers", "rollout_func")  # next to `args`


def refused(name: str, problem: str, value: Any = ...) -> ConfigError:
    """Return the error of one setting of a Python call."""
    return ConfigError("train", [Problem(name, problem, value)])


def trl_places(args: Any, settings: dict[str, Any]) -> Places:
    """Return our keys for a GRPOConfig and further arguments of TRL's trainer, by the table of `convert`.

    Settings that have no effect here are logged; those that would change the result raise ConfigError.

    Args:
        args: a GRPOConfig, read by its fields, so that TRL need not be installed; or a mapping.
        settings: those of the call, with functions by name; further arguments of TRL's trainer are removed.
    """
    fields = set_in(args)
    document = fields | {name: settings.pop(name) for name in ARGUMENTS if name in settings}
    if (quantization := settings.pop("quantization_config", None)) is not None:
        document |= set_in(quantization)
    document = with_leaves(document, _plain_leaf)
    document |= whole_groups(document, int(os.environ.get("WORLD_SIZE", 1)))
    conversion = fitted(read_trl(document))[0]
    open_rows = [row for row in conversion.rows if row.outcome == "needs a decision"]
    if open_rows:
        places = [(f"args.{row.key}" if row.key in fields else row.key, row) for row in open_rows]
        raise ConfigError("train", [Problem(place, row.reason, row.value) for place, row in places])
    idle = [row for row in conversion.rows if row.outcome == "not applicable"]
    idle = [row for row in idle if row.value is not None and row.key != "hub_token"]
    for reason in dict.fromkeys(row.reason for row in idle):
        named = ", ".join(str(row) for row in idle if row.reason == reason)
        logger.warning("not used: %s (%s)", named, reason)
    return conversion.given


def set_in(settings: Any) -> dict[str, Any]:
    """Return the fields of a foreign configuration that differ from its defaults, and those of `ALWAYS`."""
    given = _plain(settings)
    if not isinstance(settings, Mapping):
        usual = _plain(_of_defaults(type(settings)))
        always = {key: given[key] for key in ALWAYS if given.get(key) is not None}
        given = {key: value for key, value in given.items() if value != usual.get(key)} | always
    return given


def _plain(settings: Any) -> dict[str, Any]:
    if hasattr(settings, "to_dict"):
        return dict(settings.to_dict())
    if isinstance(settings, Mapping):
        return dict(settings)
    if dataclasses.is_dataclass(settings):
        return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    raise refused("args", f"is a {type(settings).__name__}; give a GRPOConfig")


def _plain_leaf(leaf: Any) -> Any:
    """Return a torch dtype as files have it, and any other leaf unchanged."""
    return str(leaf).removeprefix("torch.") if type(leaf).__name__ == "dtype" else leaf


def _of_defaults(kind: Any) -> Any:
    """Return an object with the defaults: TRL computes some, and refuses bfloat16 on some CPUs."""
    for arguments in ({}, {"use_cpu": True}, {"bf16": False}):
        try:
            return kind(**arguments)
        except (TypeError, ValueError):
            continue
    return {field.name: field.default for field in dataclasses.fields(kind)}
