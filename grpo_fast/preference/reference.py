"""The reference: one pass of the untrained policy, kept on disk instead of a model in memory."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_fast.policy import Policy
from grpo_fast.policy.gguf import cache_folder
from grpo_fast.preference.comparison import Comparison
from grpo_fast.preference.scoring import Request, RequestBatches, score

_UNRELATED = (
    "_name_or_path",
    "transformers_version",
    "dtype",
)  # of the model's configuration; dtype is the weights'


def reference_logprobs(
    policy: Policy, comparisons: Mapping[int, Comparison], *, max_tokens: int, folder: Path | None = None
) -> dict[int, Tensor]:
    """For each comparison the log-probabilities of its `sequences` under the policy as it is before training.

    Read from `folder` when a run with the same weights and the same tokens has been there, else computed
    and written.

    Args:
        policy: untrained; new adapters change nothing yet.
        comparisons: by row.
        max_tokens: tokens of one forward.
        folder: None: `reference` in the package's cache folder.

    Raises:
        ValueError: the cached file is damaged; the message names it.
        OSError: the folder cannot be written.
    """
    folder = cache_folder() / "reference" if folder is None else folder
    path = folder / f"{fingerprint(policy, comparisons)}.safetensors"
    sizes = [len(comparison.sequences) for comparison in comparisons.values()]
    if path.exists():
        flat = _load(path, sum(sizes))
    else:
        requests = [Request(c.prompt.token_ids, c.sequences) for c in comparisons.values()]
        flat = torch.cat(score(requests, RequestBatches(policy, max_tokens)))
        _save(path, flat)
    return dict(zip(comparisons, flat.split(sizes), strict=True))


def fingerprint(policy: Policy, comparisons: Mapping[int, Comparison]) -> str:
    """A hash of everything that the reference log-probabilities depend on.

    The weights, bit by bit; what the model does with them; and the tokens, in which data and chat template
    show.
    """
    digest = hashlib.sha256()
    settings = policy.base_model.config.to_dict()
    settings = {name: value for name, value in settings.items() if name not in _UNRELATED}
    digest.update(
        json.dumps([settings, policy.attention, policy.device.type], sort_keys=True, default=str).encode()
    )
    for name, weight in policy.named_weights():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    for comparison in comparisons.values():
        digest.update(repr((comparison.prompt.token_ids, comparison.sequences)).encode())
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
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, work = tempfile.mkstemp(prefix=".reference-", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise OSError(
            f"the reference cache {path.parent} cannot be written ({error.strerror}); set GRPO_FAST_CACHE or "
            "preference.reference_cache"
        ) from error
    try:
        save_file({"logprobs": flat.contiguous()}, work)
        os.replace(work, path)
    finally:
        Path(work).unlink(missing_ok=True)
