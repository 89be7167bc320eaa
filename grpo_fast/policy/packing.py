"""The packed batch: the only layout inside. Flat tokens; padding exists only at the edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_fast.distributed.shards import karmarkar_karp

EVEN = 1.01  # the busiest rank's work in units of the mean: more even is not worth a prompt computed twice


@dataclass(frozen=True)
class Sample:
    """One completion with everything the update needs. Lengths: P prompt tokens, C completion tokens."""

    prompt_ids: tuple[int, ...]  # P
    completion_ids: tuple[int, ...]  # C
    advantage: float | tuple[float, ...]  # of the whole completion, or C: of each of its tokens
    group_id: int
    sampler_logprobs: tuple[float, ...] | None = None  # C
    sampled: tuple[bool, ...] | None = None  # C: what the model wrote, and learns from; None: all of it

    @property
    def num_targets(self) -> int:
        """Completion tokens that the loss is of."""
        return len(self.completion_ids) if self.sampled is None else sum(self.sampled)

    def targets(self, values: Sequence[Any]) -> Sequence[Any]:
        """Of C values, those of the tokens that the loss is of."""
        return values if self.sampled is None else [*itertools.compress(values, self.sampled)]

    @property
    def token_advantages(self) -> tuple[float, ...]:
        """C floats."""
        if isinstance(self.advantage, tuple):
            return self.advantage
        return (self.advantage,) * len(self.completion_ids)


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch. T input tokens, N sampled completion tokens (targets), S sequences, D documents.

    Completions of one prompt share its tokens: a document is then [prompt, c1, c2, ...], the positions of
    every completion go on from the prompt's, `loss_index` names the last prompt token once for each of them,
    and `segment_ids` tell attention who sees whom: a token sees what comes before it in its document and is
    of the prompt (segment 0) or of its own completion. A completion's last token predicts nothing, so it is a
    target only and not among the inputs.
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, restart at every document
    segment_ids: Tensor  # (T,) int64, 0 for a document's prompt
    cu_seqlens: Tensor  # (D + 1,) int32: where each document begins, and T
    loss_index: Tensor  # (N,) int64 into T: the position whose hidden state predicts the target
    targets: Tensor  # (N,) int64
    sequence_ids: Tensor  # (N,) int64 in [0, S)
    group_ids: Tensor  # (N,) int64
    advantages: Tensor  # (N,) float32
    sampler_logprobs: Tensor | None  # (N,) float32
    num_sequences: int
    sample_ids: Tensor  # (S,) int64: which of the samples given to `pack` each sequence is
    old_logprobs: Tensor | None = None  # (N,) float32
    ref_logprobs: Tensor | None = None  # (N,) float32
    held_back: Tensor | None = None  # (N,) bool, chosen over the step: see `LossInputs`

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


OF_TARGETS = (
    *("targets", "sequence_ids", "group_ids", "advantages"),
    *("sampler_logprobs", "old_logprobs", "ref_logprobs", "held_back"),
)
"""The fields of a `PackedBatch` that the loss reads, of N each."""


@dataclass(frozen=True)
class TokenCosts:
    """Multiplications of a forward, or in proportion."""

    input: float  # of a token that enters the layers
    target: float  # of a token that the head predicts
    pair: float  # of two tokens that see each other

    def more_inputs(self, before: int, inputs: int) -> float:
        """The cost of `inputs` tokens after `before` others; each attends to all before it."""
        return inputs * (self.input + self.pair * (before + (inputs + 1) / 2))


def deal(samples: Sequence[Sample], ranks: int, costs: TokenCosts) -> list[list[int]]:
    """Which samples each rank computes, so that all finish together.

    Samples of one prompt go to one rank, or to as few as keep the busiest rank's work least: each of them
    computes the prompt. The same samples are dealt alike everywhere.
    """
    if ranks == 1:
        return [[*range(len(samples))]]
    families = [*_families(samples).values()]
    own = [costs.more_inputs(len(s.prompt_ids), _inputs(s)) + costs.target * s.num_targets for s in samples]
    least, best = math.inf, []
    pieces, most = 1, max(map(len, families))
    while True:
        units: list[list[int]] = []
        for members in families:
            parts = karmarkar_karp([own[i] for i in members], min(pieces, len(members)))
            units += [[members[i] for i in part] for part in parts]
        prompts = [costs.more_inputs(0, len(samples[unit[0]].prompt_ids)) for unit in units]
        work = [sum(own[i] for i in unit) + prompt for unit, prompt in zip(units, prompts, strict=True)]
        sets = karmarkar_karp(work, ranks)
        loads = [sum(work[i] for i in part) for part in sets]
        if max(loads) < least:
            least, best = max(loads), [sorted(n for i in part for n in units[i]) for part in sets]
        if max(loads) <= EVEN * sum(loads) / ranks or pieces >= most:
            return best
        pieces *= 2


def _families(samples: Sequence[Sample]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Indices of the samples that share a prompt."""
    families: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, sample in enumerate(samples):
        families.setdefault((sample.group_id, sample.prompt_ids), []).append(i)
    return families


def _inputs(sample: Sample) -> int:
    """Completion tokens that enter the model: all but the last."""
    return len(sample.completion_ids) - 1


def pack(samples: Sequence[Sample], *, max_tokens: int, device: torch.device | str) -> list[PackedBatch]:
    """Lay samples out flat, in as few and as even micro-batches as `max_tokens` input tokens each allow.

    The largest micro-batch comes first, so that a budget too large for the memory fails at once. The same
    samples give the same batches. A sequence is never split: one longer than the budget gets a micro-batch
    of its own.

    Args:
        samples: in any order; a sample may be alone in its group.
        max_tokens: input tokens of one micro-batch, shared prompts counted once.
        device: where the tensors go.

    Raises:
        ValueError: no samples, a budget below one, an empty prompt or completion, per-token fields whose
            length is not the completion's, or log-probabilities of the sampler for some samples only.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens} leaves no room for a token; give at least 1")
    if not samples:
        raise ValueError("samples is empty; skip the update when no group is left")
    for index, sample in enumerate(samples):
        _check(sample, index)
    if len({sample.sampler_logprobs is None for sample in samples}) > 1:
        raise ValueError("sampler_logprobs is None for some samples only; give them for all, or for none")
    documents, lengths = _documents(samples, max_tokens)
    batches = balance(lengths, max_tokens)
    return [_lay_out(samples, [documents[i] for i in batch]).to(device) for batch in batches]


def empty_batch(device: torch.device | str, *, sampler_logprobs: bool) -> PackedBatch:
    """A micro-batch of one input and no target: what a rank computes while another has more than it."""
    sample = Sample((0,), (0,), 0.0, 0, sampler_logprobs=(0.0,) if sampler_logprobs else None)
    (batch,) = pack([sample], max_tokens=1, device=device)
    values = {name: getattr(batch, name) for name in (*OF_TARGETS, "loss_index", "sample_ids")}
    none: dict[str, Any] = {name: value[:0] for name, value in values.items() if value is not None}
    return replace(batch, num_sequences=0, **none)


def _check(sample: Sample, index: int) -> None:
    length = len(sample.completion_ids)
    if not sample.prompt_ids:
        raise ValueError(f"samples[{index}].prompt_ids is empty: nothing predicts the first completion token")
    if not sample.num_targets:
        raise ValueError(
            f"samples[{index}].completion_ids is empty, or nothing of it is sampled; leave the sample out"
        )
    for name, values in (
        ("advantage", sample.token_advantages),
        ("sampler_logprobs", sample.sampler_logprobs),
        ("sampled", sample.sampled),
    ):
        if values is not None and len(values) != length:
            raise ValueError(
                f"samples[{index}].{name} has {len(values)} entries for {length} completion tokens; give one "
                "for each"
            )


def _documents(samples: Sequence[Sample], max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Indices of samples that share their prompt, as many as the budget holds, and each document's tokens."""
    documents: list[list[int]] = []
    lengths: list[int] = []
    for (_, prompt_ids), members in _families(samples).items():
        for place, i in enumerate(members):
            more = _inputs(samples[i])
            if place and lengths[-1] + more <= max_tokens:
                documents[-1].append(i)
                lengths[-1] += more
            else:
                documents.append([i])
                lengths.append(len(prompt_ids) + more)
    return documents, lengths


def balance(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, in the fewest bins for which longest-first placement keeps the budget."""
    oversize = [i for i, length in enumerate(lengths) if length > max_tokens]
    rest = sorted(
        (i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: (-lengths[i], i)
    )
    fewest = math.ceil(sum(lengths[i] for i in rest) / max_tokens)
    found = (_longest_first(lengths, rest, count, max_tokens) for count in itertools.count(fewest))
    bins = next(bins for bins in found if bins is not None)
    everything = [[i] for i in oversize] + [sorted(members) for members in bins]
    return sorted(everything, key=lambda members: (-sum(lengths[i] for i in members), members[0]))


def _longest_first(
    lengths: Sequence[int], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Graham's longest-processing-time rule into `count` bins; None when one would exceed the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for i in order:
        lightest = min(range(count), key=loads.__getitem__)
        if loads[lightest] + lengths[i] > max_tokens:
            return None
        bins[lightest].append(i)
        loads[lightest] += lengths[i]
    return [members for members in bins if members]


def _lay_out(samples: Sequence[Sample], documents: Sequence[Sequence[int]]) -> PackedBatch:
    input_ids: list[int] = []
    position_ids: list[int] = []
    segment_ids: list[int] = []
    loss_index: list[int] = []
    bounds = [0]
    sample_ids = [i for document in documents for i in document]
    ordered = [samples[i] for i in sample_ids]
    for document in documents:
        prompt_ids = samples[document[0]].prompt_ids
        prompt = len(prompt_ids)
        last_of_prompt = len(input_ids) + prompt - 1
        input_ids += prompt_ids
        position_ids += range(prompt)
        segment_ids += [0] * prompt
        for segment, i in enumerate(document, start=1):
            length = _inputs(samples[i])
            start = len(input_ids)
            loss_index += samples[i].targets([last_of_prompt, *range(start, start + length)])
            input_ids += samples[i].completion_ids[:-1]
            position_ids += range(prompt, prompt + length)
            segment_ids += [segment] * length
        bounds.append(len(input_ids))

    def tensor(values: Sequence[float], dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.array(values, dtype))  # torch takes five times as long over a list

    def flat(name: str, dtype: type) -> Tensor:
        values = (sample.targets(getattr(sample, name)) for sample in ordered)
        return tensor([value for own in values for value in own], dtype)

    lengths = tensor([sample.num_targets for sample in ordered])
    return PackedBatch(
        input_ids=tensor(input_ids),
        position_ids=tensor(position_ids),
        segment_ids=tensor(segment_ids),
        cu_seqlens=tensor(bounds, np.int32),
        loss_index=tensor(loss_index),
        targets=flat("completion_ids", np.int64),
        sequence_ids=torch.repeat_interleave(torch.arange(len(ordered)), lengths),
        group_ids=torch.repeat_interleave(tensor([sample.group_id for sample in ordered]), lengths),
        advantages=flat("token_advantages", np.float32),
        sampler_logprobs=None
        if samples[0].sampler_logprobs is None
        else flat("sampler_logprobs", np.float32),
        num_sequences=len(ordered),
        sample_ids=tensor(sample_ids),
    )
