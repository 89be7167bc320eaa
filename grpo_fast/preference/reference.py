"""Log-probabilities of whole completions under the reference, kept on disk.

The reference is one pass of the untrained policy instead of a model in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from grpo_fast.data.table import STRUCTURE, CompletionTable
from grpo_fast.loop.annotate import Annotator
from grpo_fast.policy import Policy
from grpo_fast.policy.source import cache_folder

# Of the model's configuration; the dtype is the weights'.
_UNRELATED = ("_name_or_path", "transformers_version", "dtype")


def with_reference(
    table: CompletionTable, annotator: Annotator, folder: Path | None = None
) -> CompletionTable:
    """With the fact `ref_logprob` (S,): of each completion under the policy as it is before training, summed.

    Read from `folder` when a run with the same weights and the same tokens has been there, else computed
    and written.

    Args:
        annotator: of an untrained policy; new adapters change nothing yet.
        folder: None: `reference` in the package's cache folder.

    Raises:
        ValueError: the cached file is damaged; the message names it.
        OSError: the folder cannot be written.
    """
    folder = cache_folder() / "reference" if folder is None else folder
    path = folder / f"{reference_digest(annotator.policy, table)}.safetensors"
    if path.exists():
        logprobs = _load(path, len(table))
    else:
        logprobs = table.sums(annotator.columns(table)[0].cpu())
        _save(path, logprobs)
    return table.with_facts(ref_logprob=logprobs)


def reference_digest(policy: Policy, table: CompletionTable) -> str:
    """A hash of everything that the reference log-probabilities depend on.

    The weights, bit by bit; what the model does with them; and the tokens, in which data and chat template
    show.
    """
    digest = hashlib.sha256()
    settings = policy.base_model.config.to_dict()
    settings = {name: value for name, value in settings.items() if name not in _UNRELATED}
    described = [settings, policy.attention, policy.device.type]
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for name, weight in policy.named_weights():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for name in STRUCTURE:
        digest.update(getattr(table, name).contiguous().numpy().data)
    return digest.hexdigest()[:40]


def _load(path: Path, count: int) -> Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        flat = load_file(path).get("logprobs")
    except SafetensorError as error:
        raise ValueError(
            f"the cached reference log-probabilities {path} are damaged ({error}); delete the file"
        ) from error
    if flat is None or flat.shape != (count,):
        raise ValueError(f"the cached reference log-probabilities {path} hold other data; delete the file")
    return flat


def _save(path: Path, flat: Tensor) -> None:
    """Written beside its place and renamed, so that it is there whole or not at all."""
    from safetensors.torch import save

    work = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_bytes(save({"logprobs": flat}))
        work.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            work.unlink()
        raise OSError(
            f"the reference cache {path.parent} cannot be written ({error.strerror}); set GRPO_FAST_CACHE or "
            "preference.reference_cache"
        ) from error
