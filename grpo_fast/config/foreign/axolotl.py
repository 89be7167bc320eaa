"""Axolotl: the YAML of a GRPO run, with its `trl:` and `vllm:` blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from grpo_fast.config.foreign.conversion import Algorithm, Conversion, Entry, convert_entries
from grpo_fast.config.foreign.names import import_path
from grpo_fast.config.foreign.rules import NOTHING, Absent, Places, Rule, find_rule, load_yaml, rules_of
from grpo_fast.config.foreign.trl import trl_rules, with_usual

# Axolotl's names: TRL's.
SYNONYMS = {
    "num_epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "torch_dtype": "dtype",
    "wandb_name": "run_name",
}
DATASET = {"path": "dataset.source", "name": "dataset.name", "split": "dataset.split"}
OWN_FUNCTION = re.compile(
    r"(?!(axolotl|chat_template|chatml|llama3|passthrough|user_defined|zephyr)\.)\w+(\.\w+)+"
)
TRANSFORM = (
    "a built-in format or a section of field names is not read: set dataset.prompt_column, prompt_template, "
    "system_prompt and rename, or dataset.transform to a function of a row, `module:function`"
)
SHARED = "here vLLM and the trainer share the GPU: lower it where they do not fit"


def read_axolotl(document: Mapping[str, Any]) -> Conversion:
    """Convert a file, whose own keys have Axolotl's names or TRL's, and its blocks."""
    if not document.get("rl") and document.keys() & {"base_model", "datasets"}:  # not a part of a file
        raise ValueError("has no `rl`, so it is supervised training; give `rl: grpo` or `rl: dpo`")
    blocks = {name: document.get(name) or {} for name in ("trl", "vllm")}
    lists = {name: document.get(name) or [] for name in ("datasets", "test_datasets")}
    for name, block in blocks.items():
        if not isinstance(block, Mapping):
            raise ValueError(f"{name} = {block!r} is not a section of keys")
    for name, datasets in lists.items():
        if not (isinstance(datasets, list) and all(isinstance(entry, Mapping) for entry in datasets)):
            raise ValueError(f"{name} = {datasets!r} is not a list of sections, `- path: NAME`")
    siblings = {SYNONYMS.get(key, key): value for key, value in {**document, **blocks["trl"]}.items()}
    siblings["use_peft"] = bool(document.get("adapter"))
    algorithm: Algorithm = "grpo" if document.get("rl") in (None, "grpo", "gdpo") else "dpo"
    table = load_yaml("axolotl.yaml")
    defaults = with_usual(table.pop("_defaults"), siblings)
    rules, notes = trl_rules(siblings, algorithm == "dpo")
    rules |= {**dict(rules_of(table)), "wandb_project": _wandb}
    notes["vllm.gpu_memory_utilization"] = SHARED
    named = [(f"trl.{key}", key, value) for key, value in blocks["trl"].items()]
    own = [(key, value) for key, value in document.items() if key not in (*blocks, *lists)]
    named += [(key, SYNONYMS.get(key, key), value) for key, value in own]
    named += [(f"vllm.{key}", f"vllm.{key}", value) for key, value in blocks["vllm"].items()]
    entries = [
        *(Entry(key, value, find_rule(name, rules), notes.get(name, "")) for key, name, value in named),
        *_datasets(lists, "datasets", ""),
        *_datasets(lists, "test_datasets", "evaluation."),
    ]
    return convert_entries("Axolotl", entries, siblings, rules, defaults, algorithm=algorithm)


def _wandb(value: Any, document: Mapping[str, Any]) -> Places:
    """Turn W&B on by its project, unless another key turns it off."""
    on = document.get("use_wandb") is not False and document.get("wandb_mode") != "disabled"
    return {"logging.project": value, "logging.wandb": on} if value else {}


def _transform(place: str, value: Any, _: Mapping[str, Any]) -> Places:
    """Take a user's function, `module.function`, that makes the columns."""
    if value and not (isinstance(value, str) and OWN_FUNCTION.fullmatch(value)):
        raise ValueError(TRANSFORM)
    return {place: import_path(value)} if value else {}


def _datasets(lists: Mapping[str, Any], key: str, prefix: str) -> Iterator[Entry]:
    """Yield the keys of the first dataset; a run has one, and one of held-out questions."""
    for position, entry in enumerate(lists[key]):
        for name, value in entry.items():
            rule: Rule = Absent(TRANSFORM, NOTHING, decide=True)
            if position:
                rule = Absent("a run has one dataset; join the files, or pick one", decide=True)
            elif name in DATASET and value is not None:
                rule = prefix + DATASET[name]
            elif name == "type":
                rule = partial(_transform, f"{prefix}dataset.transform")
            yield Entry(f"{key}.{position}.{name}", value, rule)
