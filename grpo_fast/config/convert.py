"""`grpo-fast convert`: the file of another tool in our terms, every key accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.config.foreign import nemo_rl
from grpo_fast.config.foreign.axolotl import read_axolotl
from grpo_fast.config.foreign.conversion import FILL_IN, Conversion
from grpo_fast.config.foreign.script import read_script
from grpo_fast.config.foreign.trl import read_trl
from grpo_fast.config.keys import ConfigError, Problem
from grpo_fast.config.load import merged, read_mapping, validated
from grpo_fast.config.paths import user_path
from grpo_fast.config.yaml_text import dump_yaml

SCRIPTS = (".py", ".ipynb")
READERS = {"axolotl": read_axolotl, "trl": read_trl, "nemo_rl": nemo_rl.read_nemo_rl}


def convert_file(
    path: str | Path, *, source: str | None = None, output: str | Path | None = None
) -> tuple[Conversion, str]:
    """Return what became of each key of a foreign file, and our YAML.

    Args:
        path: YAML or JSON; or a training script or notebook, which is read without running it.
        source: `axolotl`, `trl` or `nemo_rl`; by default recognised by the keys.
        output: where the YAML is to be, by which the files of a script's functions and rows are named.

    Raises:
        ConfigError: the file cannot be read, or holds no foreign configuration.
    """
    path = user_path(path, "FILE")
    if path.suffix not in (".yaml", ".yml", ".json", *SCRIPTS):
        message = (
            "is none of .yaml, .yml, .json, .py and .ipynb; write a command's flags as lines `key: value`"
        )
        raise ConfigError(str(path), [Problem("the file", message)])
    problems: list[Problem] = []
    try:
        if path.suffix in SCRIPTS:
            if source is not None or output is None:
                raise ValueError(
                    "is a script: it takes -o OUT, for its functions go beside it, and no --source"
                )
            base, here = Path(output).absolute().with_suffix(""), Path.cwd()
            base = base.relative_to(here) if base.is_relative_to(here) else base
            conversion = read_script(path, f"{base}_functions.py", f"{base}_{{}}.jsonl")
        else:
            document = nemo_rl.with_defaults(path, partial(read_mapping, problems=problems))
            if problems:
                raise ConfigError(str(path), problems)
            conversion = convert(document, source=source)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(path), [Problem("the file", str(error))]) from None
    conversion, tree = fitted(conversion)
    return conversion, conversion.heading() + dump_yaml(tree)


def fitted(conversion: Conversion) -> tuple[Conversion, dict[str, Any]]:
    """Return a conversion without what is refused here, and its configuration.

    Raises:
        ConfigError: the configuration is refused for something else than a converted key.
    """
    while True:
        tree = merged([conversion.places], [])
        unmarked = {key: value for key, value in tree.items() if (key, value) != ("max_steps", FILL_IN)}
        try:
            validated(unmarked, f"the configuration converted from {conversion.source}")
        except ConfigError as error:
            found = [(_blamed(problem, conversion.given), str(problem)) for problem in error.problems]
            refused = {place: reason for places, reason in found for place in places}
            if not refused:
                raise
            conversion = conversion.without(refused)
        else:
            return conversion, tree


def convert(document: Mapping[str, Any], *, source: str | None = None) -> Conversion:
    """Return our configuration from a foreign one, with an account of each key.

    Raises:
        ValueError: the configuration is ours already, empty, or of a tool that is not converted.
    """
    sections = {key for key, value in document.items() if isinstance(value, Mapping)}
    sections |= {key.partition(".")[0] for key in document if "." in key}
    if not document:
        raise ValueError("is empty")
    if {"model", "dataset"} <= sections:
        raise ValueError("has our sections model and dataset already; `grpo-fast train` takes it as it is")
    for key, tool in {"algo": "OpenRLHF", "ckpt": "OpenRLHF", "actor_rollout_ref": "verl"}.items():
        if key in sections:
            raise ValueError(f"is {tool}'s, which is not converted; write the keys that matter by hand")
    is_nemo = sections & {"algorithm", "policy", "grpo", "dpo"}
    is_axolotl = document.keys() & {"base_model", "rl", "trl"}
    return READERS[source or ("nemo_rl" if is_nemo else "axolotl" if is_axolotl else "trl")](document)


def _blamed(problem: Problem, places: Mapping[str, Any]) -> list[str]:
    """Return the places of converted values that are refused.

    A problem's own, or what its message begins with, else what the problem lies in, or is missing beside,
    or the first that its message names.
    """
    start, section = problem.message.partition(" ")[0], problem.name.rpartition(".")[0]
    named = [name for name in (problem.name, start, f"{problem.name}.{start}") if name in places]
    around = [place for place in places if section and f"{place}.".startswith(f"{section}.")]
    told = sorted((problem.message.index(name), name) for name in places if f"{name} = " in problem.message)
    return named[:1] or around or [name for _, name in told[:1]]
