"""Axolotl: the YAML of a GRPO run, with its `trl:` and `vllm:` blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_fast.convert.conversion import Conversion, Entry, convert_entries
from grpo_fast.convert.rules import Absent, Places, Rule, by_table, load_yaml, rules_of
from grpo_fast.convert.trl import default_entries, trl_rules

# Axolotl hands TRL what is set, so TRL's defaults hold for the rest; these are its own.
DEFAULTS: dict[str, Any] = {"max_completion_length": 512, "lr_scheduler": "cosine", "adam_beta2": 0.999}
# Axolotl's own names for what TRL calls otherwise.
SYNONYMS = {
    "micro_batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "torch_dtype": "dtype",
    "wandb_name": "run_name",
}
LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
DATASET = {"path": "dataset.source", "name": "dataset.name", "split": "dataset.split"}
TRANSFORM = "rows are not transformed by a function; set dataset.prompt_column, prompt_template and rename"


def read_axolotl(document: Mapping[str, Any]) -> Conversion:
    """Keys of the `trl:` block count as TRL's, those of the file by Axolotl's names or TRL's."""
    block = dict(document.get("trl") or {})
    siblings = {SYNONYMS.get(key, key): value for key, value in {**document, **block}.items()}
    siblings.setdefault("adapter", None)
    preference = document.get("rl") in LOSSES
    rules, notes = trl_rules(siblings, preference)
    rules |= {**dict(rules_of(load_yaml("axolotl.yaml"))), "rl": _algorithm}
    named = [(f"trl.{key}", key, value) for key, value in block.items()]
    nested = ("trl", "vllm", "datasets", "test_datasets")
    named += [(key, SYNONYMS.get(key, key), value) for key, value in document.items() if key not in nested]
    entries = [
        *(Entry(key, value, rules.get(name), notes.get(name, "")) for key, name, value in named),
        *_datasets(document, "datasets", ""),
        *_datasets(document, "test_datasets", "evaluation."),
        *(Entry(f"vllm.{key}", value, rules["vllm"]) for key, value in (document.get("vllm") or {}).items()),
        *default_entries("Axolotl", DEFAULTS, siblings, rules),
    ]
    return convert_entries("Axolotl", entries, siblings, preference=preference)


def _algorithm(value: Any, _: Mapping[str, Any]) -> Places:
    if value in LOSSES:
        return {"algorithm": "dpo", "preference.loss.loss_type": LOSSES[value]}
    if value == "gdpo":
        return {"algorithm": "grpo", "advantage.multi_objective_aggregation": "normalize_then_sum"}
    otherwise = f"is not offered; it is grpo, gdpo or one of {', '.join(LOSSES)}"
    return by_table(value, {}, to="algorithm", values={"grpo": "grpo"}, otherwise=otherwise)


def _datasets(document: Mapping[str, Any], key: str, prefix: str) -> Iterator[Entry]:
    """The first dataset; a run here has one, and one for its held-out questions."""
    for position, entry in enumerate(document.get(key) or []):
        for name, value in entry.items():
            rule: Rule = Absent(TRANSFORM)
            if position:
                rule = Absent("a run has one dataset; join the files, or pick one")
            elif name in DATASET and value is not None:
                rule = prefix + DATASET[name]
            yield Entry(f"{key}.{position}.{name}", value, rule)
