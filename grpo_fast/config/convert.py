"""Convert the file of another tool, with an account of every key: `grpo-fast convert` and `train`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.data import VERIFIERS
from grpo_fast.config.foreign import nemo_rl
from grpo_fast.config.foreign.axolotl import SYNONYMS, read_axolotl
from grpo_fast.config.foreign.conversion import FILL_IN, TO_DECIDE, UNKNOWN, Conversion
from grpo_fast.config.foreign.names import ABSENT, NAMES
from grpo_fast.config.foreign.rules import Places
from grpo_fast.config.foreign.script import read_script
from grpo_fast.config.foreign.trl import read_trl
from grpo_fast.config.keys import ConfigError, Problem, keys, unknown_key, without_positions
from grpo_fast.config.layers import LENGTH, merged, placed, read_mapping, validated
from grpo_fast.config.paths import user_path
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.tree import flatten, value_at
from grpo_fast.config.yaml_text import dump_yaml
from grpo_fast.objective.config import LARGEST

SCRIPTS = (".py", ".ipynb")
READERS = {"axolotl": read_axolotl, "trl": read_trl, "nemo_rl": nemo_rl.read_nemo_rl}
# Top-level keys that identify a tool's file; ours has none of them.
_NEMO_RL = "policy grpo dpo loss_fn env cluster checkpointing logger data defaults training group_size"
_AXOLOTL = "base_model rl trl vllm datasets test_datasets micro_batch_size"
MARKS = {
    "nemo_rl": {*_NEMO_RL.split(" ")},
    "axolotl": {*_AXOLOTL.split(" ")},
    "trl": ABSENT.keys() | {"model_name_or_path", "dataset_name"},
}
NOT_CONVERTED = {"algo": "OpenRLHF", "ckpt": "OpenRLHF", "actor_rollout_ref": "verl"}
TUTORIAL_MODEL = {"model.name", "model.max_length"}  # all keys of the section `model` in NeMo-RL's tutorial
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")


def convert_file(path: str | Path, *, output: str | Path | None = None) -> tuple[Conversion, str]:
    """Return what became of each key of a foreign file, and our YAML.

    Args:
        path: YAML or JSON; or a training script or notebook, which is read without running it.
        output: the YAML file to be written; the file of a script's functions is named after it.

    Raises:
        ConfigError: the file cannot be read, or holds no foreign configuration.
    """
    path = user_path(path, "FILE")
    problem = ""
    if path.suffix not in (".yaml", ".yml", ".json", *SCRIPTS):
        problem = "is none of .yaml, .yml, .json, .py and .ipynb; write flags as lines `key: value`"
    elif path.suffix in SCRIPTS and output is None:
        problem = "is a script: it takes -o OUT, and its functions go next to it"
    if problem:
        raise ConfigError(str(path), [Problem("the file", problem)])
    if path.suffix in SCRIPTS:
        base = Path(str(output)).absolute().with_suffix("")
        base = base.relative_to(Path.cwd()) if base.is_relative_to(Path.cwd()) else base
        try:
            found = read_script(path, f"{base}_functions.py")
        except ValueError as error:
            raise ConfigError(str(path), [Problem("the file", str(error))]) from None
    else:
        found = read_foreign(path, {})[0]
    conversion, tree = fitted(found)
    return conversion, conversion.heading() + dump_yaml(tree)


def read_foreign(path: Path, given: Mapping[str, Any]) -> tuple[Conversion, Places]:
    """Convert a file under overrides, and return those of them that are in our terms.

    An override in the tool's terms replaces the file's value. One in ours decides the keys whose reason
    names it.

    Raises:
        ConfigError: the file cannot be read, or holds no foreign configuration.
    """
    problems: list[Problem] = []
    try:
        document = nemo_rl.with_defaults(path, partial(read_mapping, problems=problems))
        if problems:
            raise ConfigError(str(path), problems)
        tool = tool_of(document)
        if any(given.get(name) is not None for name in LENGTH):
            document = {name: value for name, value in document.items() if name not in LENGTH}
        theirs = {name: value for name, value in given.items() if _is_theirs(name, value, document, tool)}
        document = merged([document, theirs], problems) if theirs else document
        conversion = convert(document)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(path), [Problem("the file", str(error))]) from None
    both = NAMES.keys() & keys().keys() - {name for name, value in theirs.items() if value is None}
    ours = {name: value for name, value in given.items() if name not in theirs or name in both}
    algorithm = conversion.given.get("algorithm", "grpo")
    if (asked := ours.get("algorithm", algorithm)) != algorithm:
        message = f"the file's keys are read as those of {algorithm}; set the algorithm by the file's own key"
        raise ConfigError(str(path), [Problem("algorithm", message, asked)])
    decided = {*flatten(placed(ours, {**document, **given}, []))}
    decided |= {place for row in conversion.rows if row.key in theirs for place in row.places}
    for row in conversion.rows:
        if row.outcome == TO_DECIDE and (by := _deciding(row.reason, decided)):
            conversion = conversion.decided(row.key, by)
    return conversion, ours


def fitted(
    conversion: Conversion, layered: Callable[[Places], dict[str, Any]] = lambda file: merged([file], [])
) -> tuple[Conversion, dict[str, Any]]:
    """Return a conversion without the values that are refused here, and its configuration.

    Args:
        layered: makes the configuration of the converted places.

    Raises:
        ConfigError: the configuration is refused for something else than a converted key.
    """
    while True:
        tree = layered(conversion.places)
        # Any share of a run of unknown length fits.
        unmarked = {**tree, "max_steps": LARGEST} if tree.get("max_steps") == FILL_IN else tree
        try:
            validated(unmarked, f"the configuration converted from {conversion.source}")
            return conversion, tree
        except ConfigError as error:
            found = [(_blamed(problem, conversion.given), str(problem)) for problem in error.problems]
            refused = {place: reason for places, reason in found for place in places}
            if not refused:
                raise
            conversion = conversion.without(refused)


def open_problems(conversion: Conversion, tree: Mapping[str, Any]) -> list[Problem]:
    """List what a person has to decide or set before a converted configuration can be used."""
    problems = []
    for row in (row for row in conversion.rows if row.outcome == TO_DECIDE):
        remedy = "" if row.missing or row.value is None else f"; {row.key}=null leaves it out"
        reason = " ".join(row.reason.split())
        if reason == UNKNOWN and row.key in {*keys(), *NAMES}:
            reason = f"is a key of files of grpo-fast, and not of {conversion.source}; give it as an override"
        elif reason == UNKNOWN and "did you mean" in (hint := unknown_key(row.key).message):
            reason += hint.removeprefix("no such key")
        problems.append(Problem(row.key, reason + remedy, row.value))
    missing = {place for place in conversion.fill_in if value_at(tree, place) is None}
    if tree.get("epochs"):
        missing -= {"max_steps"}
    if value_at(tree, "rollout.environment") or str(value_at(tree, "dataset.source")).startswith(VERIFIERS):
        missing -= {"rewards"}
    message = "is not in the file, and is required; add {}=VALUE"
    return problems + [Problem(place, message.format(place)) for place in sorted(missing)]


def recognized(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tools that have top-level keys of a file, with these keys; none for a file of ours."""
    if _ours(document):
        return {}
    found = {tool: sorted(_tops(document) & marks) for tool, marks in MARKS.items()}
    nested = {place.partition(".")[0] for place in flatten(document) if "." in place}
    found["nemo_rl"] += sorted(nested & {"algorithm", "model"})
    return {tool: keys for tool, keys in found.items() if keys}


def tool_of(document: Mapping[str, Any]) -> str | None:
    """Return the tool of a file; None where no key tells.

    Raises:
        ValueError: the keys are those of two tools.
    """
    found = recognized(document)
    if "nemo_rl" in found and len(found) > 1:
        other = next(tool for tool in found if tool != "nemo_rl")
        theirs = f"{', '.join(found[other])} those of {'TRL' if other == 'trl' else 'Axolotl'}"
        raise ValueError(f"{', '.join(found['nemo_rl'])} are NeMo-RL's keys, and {theirs}; keep one tool's")
    return next(iter(found), None)


def convert(document: Mapping[str, Any]) -> Conversion:
    """Return our configuration from a foreign one, with an account of each key.

    Raises:
        ValueError: the configuration is ours already, empty, or of a tool that is not converted.
    """
    tops = _tops(document)
    if not document:
        raise ValueError("is empty")
    for key in tops & NOT_CONVERTED.keys():
        raise ValueError(f"is {NOT_CONVERTED[key]}'s, which is not converted; write the keys by hand")
    if ours := _ours(document):
        raise ValueError(f"has our sections already ({', '.join(ours)}); `grpo-fast train` takes it as it is")
    source = tool_of(document) or ("trl" if tops & NAMES.keys() else None)
    if source is None:
        raise ValueError("holds no key of TRL, Axolotl or NeMo-RL")
    return READERS[source](document)


def _tops(document: Mapping[str, Any]) -> set[str]:
    return {key.partition(".")[0] for key in document}


def _ours(document: Mapping[str, Any]) -> list[str]:
    """Return the top-level keys that only our files have."""
    shared = {"algorithm", *NAMES}  # NeMo-RL's section, and flat names
    if {place for place in flatten(document) if place.partition(".")[0] == "model"} <= TUTORIAL_MODEL:
        shared.add("model")
    if isinstance(document.get("optimizer"), str):  # Axolotl's
        shared.add("optimizer")
    return sorted(_tops(document) & TrainConfig.model_fields.keys() - shared)


def _is_theirs(name: str, value: Any, document: Mapping[str, Any], tool: str | None) -> bool:
    """Whether an override is in the terms of the file's tool; a flat name such as `max_steps` is in both."""
    top, flat = name.partition(".")[0], tool != "nemo_rl" and name in NAMES and name != "algorithm"
    if tool == "axolotl" and name in SYNONYMS and not isinstance(value, Mapping):
        return True  # its `optimizer` is a name, and ours a section
    if flat or without_positions(name) in keys():
        return flat
    return name in document or isinstance(document.get(top), Mapping | list) or top in MARKS[str(tool)]


def _deciding(reason: str, decided: set[str]) -> str | None:
    """Return the key of ours, set elsewhere, that a reason names as the remedy."""
    named = [word for word in _KEY.findall(reason) if word in keys()]
    named = [word for word in named if "." in word or "_" in word or word in ("rewards", "minibatches")]
    return next((word for word in named for one in decided if f"{one}.".startswith(f"{word}.")), None)


def _blamed(problem: Problem, places: Mapping[str, Any]) -> list[str]:
    """Return the converted place that a problem names first, else those of its section."""
    text = f"{problem.name}: {problem.name}.{problem.message}"
    named = [
        found for place in places if (found := re.search(rf"(?<!\w){re.escape(place)}(?!\w|\.[a-z_])", text))
    ]
    if named:
        return [min(named, key=lambda found: found.start())[0]]
    section = problem.name.rpartition(".")[0] or problem.name
    return [place for place in places if place.startswith(f"{section}.")]
