"""Axolotl: the YAML of a GRPO run, with its `trl:` and `vllm:` blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.conversion import Account, Conversion
from grpo_fast.convert.preference import AXOLOTL_LOSSES
from grpo_fast.convert.trl import BATCH, STEPS, put_batch, put_defaults, put_steps

# Axolotl hands TRL what is set, so TRL's defaults hold for the rest; these are its own.
DEFAULTS: dict[str, Any] = {"max_completion_length": 512, "lr_scheduler": "cosine", "adam_beta2": 0.999}
# Axolotl's own names for what the table knows by another.
SYNONYMS = {
    "micro_batch_size": "per_device_train_batch_size",
    "optimizer": "optim",
    "torch_dtype": "dtype",
    "wandb_name": "run_name",
}
DATASET = {"path": "dataset.source", "name": "dataset.name", "split": "dataset.split"}
TRANSFORM = "rows are not transformed by a function; set dataset.prompt_column, prompt_template and rename"
BLOCKS = ("trl", "vllm")
ENGINE = "the rollout engine runs in the trainer's process and sets itself up; see the keys of `rollout`"
ASYNC = "generation and training take turns; completions are always the current policy's"
REASONS = {
    "async_prefetch": ASYNC,
    "prefetch_depth": ASYNC,
    "replay_buffer_size": ASYNC,
    "replay_recompute_logps": ASYNC,
    "reroll_max_groups": ASYNC,
    "reroll_start_fraction": ASYNC,
    "streaming_min_groups": ASYNC,
    "streaming_partial_batch": ASYNC,
    "use_data_producer": ASYNC,
    "vllm_sync_interval": ASYNC,
    "lora_mlp_kernel": "LoRA runs through peft",
    "lora_o_kernel": "LoRA runs through peft",
    "lora_qkv_kernel": "LoRA runs through peft",
    "model_type": "the model's own configuration names its class",
    "rollout_func": "answers are single turns by the rollout engine",
    "reward_num_workers": "rewards run in threads, each with a time limit: rewards.timeout",
    "skip_zero_advantage_batches": "groups without spread leave the update: advantage.skip_flat_groups",
    "special_tokens": "the tokenizer's own tokens are used; nothing is padded",
    "strict": "unknown keys are always errors",
    "tokenizer_type": "the model's own configuration names its class",
    "use_liger_loss": "the head's own kernels compute the loss",
    "val_set_size": "held-out questions come from a dataset of their own: evaluation.dataset",
    "vllm_lora_sync": ENGINE,
    "vllm_guided_decoding_regex": "it would draw from another distribution than the policy's",
    "xformers_attention": "model.attention is auto, sdpa, flash_attention_2 or flex_attention",
}


def convert_axolotl(document: Mapping[str, Any]) -> Conversion:
    """Every key of the document and of its blocks is in the account."""
    rl = document.get("rl")
    account = Account("Axolotl", preference=rl in AXOLOTL_LOSSES)
    block = dict(document.get("trl") or {})
    siblings = {SYNONYMS.get(key, key): value for key, value in {**document, **block}.items()}
    siblings.setdefault("adapter", None)
    entries = [(f"trl.{key}", key, value) for key, value in block.items()]
    entries += [(key, SYNONYMS.get(key, key), value) for key, value in document.items() if key not in BLOCKS]
    labels = {name: key for key, name, _ in entries}
    per_rollout = put_batch(account, siblings, labels)
    for key, name, value in sorted(entries, key=lambda entry: entry[1] != "loss_type"):
        if key == "rl":
            put_algorithm(account, value)
        elif key in ("datasets", "test_datasets"):
            put_datasets(account, key, value)
        elif name in REASONS:
            account.leave(key, value, REASONS[name])
        elif name in STEPS:
            put_steps(account, key, name, value, siblings, per_rollout)
        elif name not in BATCH:
            account.by_table(key, name, value, siblings)
    for key, value in (document.get("vllm") or {}).items():
        account.leave(f"vllm.{key}", value, ENGINE)
    put_defaults(account, DEFAULTS, {**siblings, "lr_scheduler": document.get("lr_scheduler")})
    return account.finish()


def put_algorithm(account: Account, value: Any) -> None:
    if value == "gdpo":
        places = {"algorithm": "grpo", "advantage.multi_objective_aggregation": "normalize_then_sum"}
        account.put("rl", value, places)
    elif value == "grpo":
        account.put("rl", value, {"algorithm": "grpo"})
    elif value in AXOLOTL_LOSSES:
        account.put("rl", value, {"algorithm": "dpo", "preference.loss.loss_type": AXOLOTL_LOSSES[value]})
    else:
        account.leave("rl", value, f"is not offered; it is grpo, gdpo or one of {', '.join(AXOLOTL_LOSSES)}")


def put_datasets(account: Account, key: str, value: Any) -> None:
    """The first dataset; a run here has one, and one for its held-out questions."""
    prefix = "" if key == "datasets" else "evaluation."
    for position, entry in enumerate(value or []):
        for name, item in entry.items():
            full = f"{key}.{position}.{name}"
            if position:
                account.leave(full, item, "a run has one dataset; join the files, or pick one")
            elif name in DATASET and item is not None:
                account.put(full, item, {prefix + DATASET[name]: item})
            else:
                account.leave(full, item, TRANSFORM)
