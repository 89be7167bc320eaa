"""TRL: a `GRPOConfig` or `DPOConfig` as JSON, or the YAML of its command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.convert.conversion import Account, Conversion
from grpo_fast.convert.preference import SAMPLING

# What a missing key means there, where ours would mean something else.
DEFAULTS: dict[str, Any] = {
    "max_completion_length": 512,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.999,
    "gradient_checkpointing": True,
}
BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")
DPO_ONLY = ("precompute_ref_log_probs", "f_divergence_type", "truncation_mode", "ld_alpha")


def convert_trl(document: Mapping[str, Any]) -> Conversion:
    """Every key of the document is in the account, and so is every default that differs from ours."""
    preference = "num_generations" not in document and any(key in document for key in DPO_ONLY)
    account = Account("TRL", preference)
    per_rollout = put_batch(account, document, {})
    # The loss first: which of its terms are read depends on it.
    for key in sorted(document, key=lambda key: key != "loss_type"):
        value = document[key]
        if key in STEPS:
            put_steps(account, key, key, value, document, per_rollout)
        elif key not in BATCH:
            account.by_table(key, key, value, document)
    defaults = dict(DEFAULTS)
    if document.get("use_vllm"):
        defaults["vllm_importance_sampling_correction"] = True
    if document.get("beta") and not preference:
        defaults["use_bias_correction_kl"] = True
    put_defaults(account, defaults, document)
    return account.finish()


def put_defaults(account: Account, defaults: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    """Write down what the source means by a key that is not there, unless another key set its place."""
    for key, value in defaults.items():
        if document.get(key) is None:
            probe = Account(account.source)
            probe.by_table(key, key, value, {**document, key: value})
            ours = set(probe.places) & set(account.places)
            unread = account.preference and any(place.split(".")[0] in SAMPLING for place in probe.places)
            if not ours and not unread:
                account.put(key, value, probe.places, f"{account.source}'s default", default=True)


def put_batch(account: Account, document: Mapping[str, Any], labels: Mapping[str, str]) -> int:
    """Prompts a step and minibatches from TRL's four batch sizes; returns optimiser steps per rollout.

    `labels`: what the source calls them, where it has another name.

    TRL generates `generation_batch_size` completions, by default per-device batch x processes x
    steps_per_generation, and makes an optimiser step of every `gradient_accumulation_steps` batches of them.
    """
    given = {key: document[key] for key in BATCH if document.get(key) is not None}
    group = 1 if account.preference else document.get("num_generations") or 8
    batch = given.get("per_device_train_batch_size", 8)
    accumulation = given.get("gradient_accumulation_steps", 1)
    per_rollout = given.get("steps_per_generation") or accumulation
    rollout = given.get("generation_batch_size") or batch * per_rollout
    prompts, prompts_rest = divmod(rollout, group)
    minibatches, minibatches_rest = divmod(rollout, batch * accumulation)
    whole = prompts and minibatches and not prompts_rest and not minibatches_rest and minibatches <= prompts
    places = {"prompts_per_step": prompts} | ({} if account.preference else {"minibatches": minibatches})
    reason = f"one process: {rollout} completions a rollout, {group} a prompt, {batch * accumulation} a step"
    for key in [key for key in BATCH if key in document]:
        label = labels.get(key, key)
        if key not in given:
            account.leave(label, None, "follows from the other batch sizes")
        elif whole:
            account.put(label, given[key], places, reason)
        else:
            account.leave(label, given[key], f"{reason}: this does not divide; set prompts_per_step")
    if not given and whole:
        account.put("per_device_train_batch_size", batch, places, f"default; {reason}", default=True)
    return (minibatches if whole else 1) * (document.get("num_iterations") or 1)


def put_steps(
    account: Account, key: str, name: str, value: Any, siblings: Mapping[str, Any], per_rollout: int
) -> None:
    """A count of optimiser steps there, of rollouts here."""
    if per_rollout == 1 or not isinstance(value, int) or value <= 0:
        account.by_table(key, name, value, siblings)
        return
    probe = Account(account.source)
    probe.by_table(key, name, -(-value // per_rollout), siblings)
    account.put(key, value, probe.places, f"a step here is a rollout, {per_rollout} optimiser steps there")
