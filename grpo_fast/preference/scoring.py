"""Log-probabilities of whole completions: of the policy, and once of the reference, which is kept on disk.

Completions of a prompt share its tokens in a micro-batch. The reference is one pass of the untrained policy
instead of a model in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from grpo_fast.head import linear_logprob
from grpo_fast.policy import Policy, pack
from grpo_fast.policy.out_of_memory import MicroBatchBudget
from grpo_fast.policy.packing import balance
from grpo_fast.policy.source import cache_folder
from grpo_fast.preference.comparison import Comparison
from grpo_fast.table import Completions

# Of the model's configuration; the dtype is the weights'.
_UNRELATED = ("_name_or_path", "transformers_version", "dtype")


class ComparisonBatches(MicroBatchBudget):
    """Splits comparisons within a budget of tokens; the completions of a prompt stay together.

    Args:
        configured: tokens of a micro-batch, while the memory holds them.
    """

    def __init__(self, policy: Policy, configured: int) -> None:
        super().__init__(
            unit="one prompt with its completions", remedy="shorten the longest completions of the data"
        )
        self.policy = policy
        self.configured = configured

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch now."""
        return self.tokens(self.configured)

    def attempts_at(
        self, comparisons: Sequence[Comparison]
    ) -> Iterator[tuple[AbstractContextManager[None], list[list[int]]]]:
        """`attempts` with the indices of each micro-batch's comparisons."""
        sizes = [c.num_tokens for c in comparisons]

        def cut() -> tuple[list[list[int]], int, int]:
            parts = balance(sizes, self.max_tokens)
            return parts, max(sum(sizes[i] for i in part) for part in parts), max(sizes)

        return self.attempts(cut)


def sequence_logprobs(
    policy: Policy, comparisons: Sequence[Comparison], weight_grad: Tensor | None = None
) -> Tensor:
    """(S,) float32: log-probability of each completion, summed over its tokens, in one forward.

    Args:
        comparisons: with S completions, in this order.
        weight_grad: as of `linear_logprob`.
    """
    rows = [
        (comparison.prompt.token_ids, completion, number)
        for number, comparison in enumerate(comparisons)
        for completion in comparison.completion_ids
    ]
    everything = sum(comparison.num_tokens for comparison in comparisons)
    table = Completions.of(*zip(*rows, strict=True))
    (batch,) = pack(table, max_tokens=everything, device=policy.device)
    head = policy.head
    tokens = linear_logprob(
        policy.hidden_states(batch),
        head.weight if weight_grad is None else head.weight.detach(),
        batch.targets,
        weight_grad=weight_grad,
        **head.options,
    ).logprob
    return tokens.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, tokens)


@torch.no_grad()
def score(comparisons: Sequence[Comparison], batches: ComparisonBatches) -> list[Tensor]:
    """For each comparison the log-probabilities (n,) of its completions: float32, on the CPU, no gradient."""
    scores: dict[int, Tensor] = {}
    for attempt, parts in batches.attempts_at(comparisons):
        with attempt:
            for part in parts:
                members = [comparisons[i] for i in part]
                found = sequence_logprobs(batches.policy, members).cpu()
                scores |= zip(part, found.split([len(m.completion_ids) for m in members]), strict=True)
    return [scores[i] for i in range(len(comparisons))]


def with_reference(
    comparisons: Mapping[int, Comparison], batches: ComparisonBatches, folder: Path | None = None
) -> dict[int, Comparison]:
    """The comparisons of each row with `ref_logprobs` of the policy as it is before training.

    Read from `folder` when a run with the same weights and the same tokens has been there, else computed
    and written.

    Args:
        batches: of an untrained policy; new adapters change nothing yet.
        folder: None: `reference` in the package's cache folder.

    Raises:
        ValueError: the cached file is damaged; the message names it.
        OSError: the folder cannot be written.
    """
    folder = cache_folder() / "reference" if folder is None else folder
    path = folder / f"{fingerprint(batches.policy, comparisons)}.safetensors"
    sizes = [len(comparison.sequences) for comparison in comparisons.values()]
    if path.exists():
        flat = _load(path, sum(sizes))
    else:
        everything = [replace(c, completion_ids=c.sequences) for c in comparisons.values()]
        flat = torch.cat(score(everything, batches))
        _save(path, flat)
    found = zip(comparisons.items(), flat.split(sizes), strict=True)
    return {index: replace(c, ref_logprobs=tuple(values.tolist())) for (index, c), values in found}


def fingerprint(policy: Policy, comparisons: Mapping[int, Comparison]) -> str:
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
