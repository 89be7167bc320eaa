"""Axolotl: the YAML of a GRPO run, with its `trl:` and `vllm:` blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_fast.convert.absent import Absent
from grpo_fast.convert.conversion import Entry, ForeignConfig
from grpo_fast.convert.names import Rule, mapped
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
TRANSFORM = Absent(
    "rows are not transformed by a function; set dataset.prompt_column, prompt_template and rename"
)
ENGINE = Absent(
    "the rollout engine runs in the trainer's process and sets itself up; see the keys of `rollout`"
)
REASONS = {
    "generation and training take turns; completions are always the current policy's": (
        "async_prefetch prefetch_depth replay_buffer_size replay_recompute_logps reroll_max_groups "
        "reroll_start_fraction streaming_min_groups streaming_partial_batch use_data_producer "
        "vllm_sync_interval"
    ),
    "LoRA runs through peft": "lora_mlp_kernel lora_o_kernel lora_qkv_kernel",
    "the model's own configuration names its class": "model_type tokenizer_type",
    "answers are single turns by the rollout engine": "rollout_func",
    "rewards run in threads, each with a time limit: rewards.timeout": "reward_num_workers",
    "groups without spread leave the update: advantage.skip_flat_groups": "skip_zero_advantage_batches",
    "the tokenizer's own tokens are used; nothing is padded": "special_tokens",
    "unknown keys are always errors": "strict",
    "the head's own kernels compute the loss": "use_liger_loss",
    "held-out questions come from a dataset of their own: evaluation.dataset": "val_set_size",
    ENGINE.reason: "vllm_lora_sync",
    "it would draw from another distribution than the policy's": "vllm_guided_decoding_regex",
    "model.attention is auto, sdpa, flash_attention_2 or flex_attention": "xformers_attention",
}
ABSENT: dict[str, Rule] = {
    name: Absent(reason) for reason, names in REASONS.items() for name in names.split()
}


def read_axolotl(document: Mapping[str, Any]) -> ForeignConfig:
    """Keys of the `trl:` block count as TRL's, those of the file by Axolotl's names or TRL's."""
    block = dict(document.get("trl") or {})
    siblings = {SYNONYMS.get(key, key): value for key, value in {**document, **block}.items()}
    siblings.setdefault("adapter", None)
    preference = document.get("rl") in LOSSES
    rules, notes = trl_rules(siblings, preference)
    rules |= ABSENT | {"rl": _algorithm}
    named = [(f"trl.{key}", key, value) for key, value in block.items()]
    nested = ("trl", "vllm", "datasets", "test_datasets")
    named += [(key, SYNONYMS.get(key, key), value) for key, value in document.items() if key not in nested]
    entries = [Entry(key, value, rules.get(name), notes.get(name, "")) for key, name, value in named]
    entries += [
        *_datasets(document, "datasets", ""),
        *_datasets(document, "test_datasets", "evaluation."),
        *(Entry(f"vllm.{key}", value, ENGINE) for key, value in (document.get("vllm") or {}).items()),
    ]
    defaults = default_entries("Axolotl", DEFAULTS, siblings, rules)
    return ForeignConfig("Axolotl", preference, entries, siblings, defaults)


def _algorithm(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if value in LOSSES:
        return {"algorithm": "dpo", "preference.loss.loss_type": LOSSES[value]}
    if value == "gdpo":
        return {"algorithm": "grpo", "advantage.multi_objective_aggregation": "normalize_then_sum"}
    otherwise = f"is not offered; it is grpo, gdpo or one of {', '.join(LOSSES)}"
    return mapped("algorithm", {"grpo": "grpo"}, otherwise)(value, {})


def _datasets(document: Mapping[str, Any], key: str, prefix: str) -> Iterator[Entry]:
    """The first dataset; a run here has one, and one for its held-out questions."""
    for position, entry in enumerate(document.get(key) or []):
        for name, value in entry.items():
            rule: Rule = TRANSFORM
            if position:
                rule = Absent("a run has one dataset; join the files, or pick one")
            elif name in DATASET and value is not None:
                rule = prefix + DATASET[name]
            yield Entry(f"{key}.{position}.{name}", value, rule)
