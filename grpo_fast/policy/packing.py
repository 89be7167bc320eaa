"""Packed batches of flat tokens, and their division into micro-batches and over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_fast.data.table import CompletionTable, Integers, offsets_of, ranges
from grpo_fast.distributed.shards import karmarkar_karp

EVEN = 1.01  # accepted work of the busiest rank, relative to the mean


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch. T input tokens, N sampled completion tokens (targets), S sequences, D documents.

    A document is [prompt, c1, c2, ...]; the positions of each completion continue the prompt's. A token
    attends to earlier tokens of its document in the prompt (segment 0) or its own completion. A completion's
    last token is only a target.
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, restart at every document
    segment_ids: Tensor  # (T,) int64, 0 for a document's prompt
    cu_seqlens: Tensor  # (D + 1,) int32: where each document begins, and T
    loss_index: Tensor  # (N,) int64 into T: the position whose hidden state predicts the target
    targets: Tensor  # (N,) int64
    sequence_ids: Tensor  # (N,) int64 in [0, S)
    group_ids: Tensor  # (N,) int64
    num_sequences: int
    rows: Tensor  # (S,) int64: each sequence's completion in the table
    token_index: Tensor  # (N,) int64: each target's token in the table
    input_index: Tensor  # (T,) int64 into the table's prompts, followed by its completions
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # the table's, (N,) each
    images: tuple[Any, ...] = ()  # `PromptImages` or None of each document's prompt; empty: no images
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # the table's, (T, ...) each

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the batch with its tensors on `device`."""
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        columns, inputs = (
            {name: values.to(device) for name, values in part.items()} for part in (self.columns, self.inputs)
        )
        return replace(self, **moved, columns=columns, inputs=inputs)

    def with_columns(self, table: CompletionTable) -> PackedBatch:
        """Return the batch with its table's columns and inputs."""
        device = self.targets.device

        def of(known: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
            return {name: values[index.to(values.device)].to(device) for name, values in known.items()}

        inputs = of(table.inputs, self.input_index) if len(self.input_index) else {}
        return replace(self, columns=of(table.columns, self.token_index), inputs=inputs)


@dataclass(frozen=True)
class TokenCosts:
    """Multiplications of a forward, or numbers in proportion."""

    input: float  # per token that enters the layers
    target: float  # per token that the head predicts
    pair: float  # per two tokens that attend to each other

    def more_inputs(self, before: int, inputs: int) -> float:
        """Return the cost of `inputs` tokens after `before` others."""
        return inputs * (self.input + self.pair * (before + (inputs + 1) / 2))


def assign_to_ranks(
    table: CompletionTable,
    ranks: int,
    costs: TokenCosts,
    shares_prompts: bool = True,
    whole_groups: bool = False,
) -> list[list[int]]:
    """Return the completions of each rank, with balanced work. The result is the same on all ranks.

    Completions of a prompt go to as few ranks as balance allows, since each rank computes the prompt. With
    `whole_groups` a group is never split.
    """
    if ranks == 1:
        return [[*range(len(table))]]
    families = _families(table.compared if whole_groups else table.prompts if shares_prompts else None, table)
    prompt_lengths, lengths = table.prompt_lengths.tolist(), table.lengths.tolist()
    own = [
        costs.more_inputs(prompt, length - 1) + costs.target * targets
        for prompt, length, targets in zip(prompt_lengths, lengths, table.num_targets.tolist(), strict=True)
    ]
    least, best = math.inf, []
    pieces, most = 1, max(map(len, families))
    while True:
        units: list[list[int]] = []
        for members in families:
            parts = karmarkar_karp([own[i] for i in members], min(pieces, len(members)))
            units += [[members[i] for i in part] for part in parts]
        prompts = [costs.more_inputs(0, prompt_lengths[unit[0]]) for unit in units]
        work = [sum(own[i] for i in unit) + prompt for unit, prompt in zip(units, prompts, strict=True)]
        sets = karmarkar_karp(work, ranks)
        loads = [sum(work[i] for i in part) for part in sets]
        if max(loads) < least:
            least, best = max(loads), [sorted(n for i in part for n in units[i]) for part in sets]
        if whole_groups or max(loads) <= EVEN * sum(loads) / ranks or pieces >= most:
            return best
        pieces *= 2


def _families(keys: Tensor | None, table: CompletionTable) -> list[list[int]]:
    """Return the rows with equal keys (S,); without keys each row is a family."""
    if keys is None:
        return [[row] for row in range(len(table))]
    families: dict[int, list[int]] = {}
    for row, key in enumerate(keys.tolist()):
        families.setdefault(key, []).append(row)
    return [*families.values()]


def pack(table: CompletionTable, **options: Any) -> list[PackedBatch]:
    """Lay out micro-batches as `laid_out`, with the table's columns."""
    return [batch.with_columns(table) for batch in laid_out(table, **options)]


def laid_out(
    table: CompletionTable,
    *,
    max_tokens: int,
    device: torch.device | str,
    whole_groups: bool = False,
    shares_prompts: bool = True,
) -> list[PackedBatch]:
    """Pack completions into as few and as even micro-batches as `max_tokens` allows.

    The largest micro-batch comes first, so that too large a budget fails at once. The result is
    deterministic. A sequence longer than the budget gets its own micro-batch.

    Args:
        table: completions in any order.
        max_tokens: input tokens of one micro-batch, shared prompts counted once.
        device: of the tensors.
        whole_groups: keep each group in one micro-batch, even if it exceeds the budget.
        shares_prompts: false: one document per completion.

    Raises:
        ValueError: no completions, or a budget below one.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens} leaves no room for a token; give at least 1")
    if not len(table):
        raise ValueError("the table is empty; skip the update when no group is left")
    units, lengths = units_of(table, max_tokens, shares_prompts, whole_groups)
    batches = balance(lengths, max_tokens)
    # Prompts and completions are read from one array.
    tokens = np.concatenate([table.prompt_ids.numpy(), table.token_ids.numpy()])
    return [_lay_out(table, tokens, [d for i in batch for d in units[i]]).to(device) for batch in batches]


def empty_batch(table: CompletionTable, device: torch.device | str) -> PackedBatch:
    """Return a micro-batch of one input and no target, for a rank with fewer micro-batches than others."""
    (batch,) = laid_out(CompletionTable.of([[0]], [[0]]), max_tokens=1, device=device)
    of_targets = ("loss_index", "targets", "sequence_ids", "group_ids", "token_index")
    none = {name: getattr(batch, name)[:0] for name in (*of_targets, "rows", "input_index")}
    return replace(batch, num_sequences=0, **none).with_columns(table)


def units_of(
    table: CompletionTable, max_tokens: float, shares_prompts: bool, whole_groups: bool
) -> tuple[list[list[list[int]]], list[int]]:
    """Return the units of documents that stay in one micro-batch, and the input tokens of each unit."""
    documents, lengths = _documents(table, math.inf if whole_groups else max_tokens, shares_prompts)
    if not whole_groups:
        return [[document] for document in documents], lengths
    units: dict[int, list[list[int]]] = {}
    tokens: dict[int, int] = {}
    compared = table.compared.tolist()
    for document, length in zip(documents, lengths, strict=True):
        group = compared[document[0]]
        units.setdefault(group, []).append(document)
        tokens[group] = tokens.get(group, 0) + length
    return [*units.values()], [*tokens.values()]


def _documents(
    table: CompletionTable, max_tokens: float, shares_prompts: bool
) -> tuple[list[list[int]], list[int]]:
    """Return the rows of each document, as many as the budget holds, and each document's tokens."""
    documents: list[list[int]] = []
    lengths: list[int] = []
    inputs, prompts = (table.lengths - 1).tolist(), table.prompt_lengths.tolist()
    for members in _families(table.prompts if shares_prompts else None, table):
        for place, i in enumerate(members):
            if place and lengths[-1] + inputs[i] <= max_tokens:
                documents[-1].append(i)
                lengths[-1] += inputs[i]
            else:
                documents.append([i])
                lengths.append(prompts[i] + inputs[i])
    return documents, lengths


def balance(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the indices of `lengths` in the fewest bins for which longest-first placement fits."""
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
    """Fill `count` bins by Graham's longest-processing-time rule; None if one would exceed the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for i in order:
        lightest = min(range(count), key=loads.__getitem__)
        if loads[lightest] + lengths[i] > max_tokens:
            return None
        bins[lightest].append(i)
        loads[lightest] += lengths[i]
    return [members for members in bins if members]


def _lay_out(table: CompletionTable, tokens: Integers, documents: Sequence[Sequence[int]]) -> PackedBatch:
    """Lay out runs of tokens: a document's prompt, and the inputs of each of its completions."""
    rows = np.array([row for document in documents for row in document], np.int64)
    counts = np.array([len(document) for document in documents], np.int64)
    first = offsets_of(counts)[:-1]  # of each document, among the sequences
    starts, lengths = table.offsets.numpy()[rows], table.lengths.numpy()[rows]
    prompts = table.prompts.numpy()[rows]
    prompt_lengths = table.prompt_lengths.numpy()[rows]
    # Runs of prompts and completions, in the order of the layout.
    of_prompt = first + np.arange(len(documents))
    of_completion = np.arange(len(rows)) + np.repeat(np.arange(len(documents)), counts) + 1
    sizes = np.empty(len(rows) + len(documents), np.int64)
    sizes[of_prompt], sizes[of_completion] = prompt_lengths[first], lengths - 1
    runs = offsets_of(sizes)
    sources, begins, segments = np.empty_like(sizes), np.zeros_like(sizes), np.zeros_like(sizes)
    sources[of_prompt] = table.prompt_offsets.numpy()[prompts[first]]
    sources[of_completion] = starts + len(table.prompt_ids)
    begins[of_completion] = prompt_lengths
    segments[of_completion] = np.arange(len(rows)) - np.repeat(first, counts) + 1
    place = np.arange(runs[-1]) - np.repeat(runs[:-1], sizes)

    # The last prompt token predicts a completion's first token, and each of its own the next.
    token_index = ranges(starts, lengths)
    ends = runs[:-1][np.repeat(of_prompt, counts)] + prompt_lengths - 1
    bounds = offsets_of(lengths)[:-1]
    loss_index = np.repeat(runs[:-1][of_completion] - 1 - bounds, lengths) + np.arange(len(token_index))
    loss_index[bounds] = ends
    sequence_ids = np.repeat(np.arange(len(rows)), lengths)
    written = table.mask.numpy()[token_index]
    if not written.all():
        token_index, loss_index, sequence_ids = (v[written] for v in (token_index, loss_index, sequence_ids))

    images = table.objects.get("images", ())
    tensor, input_index = torch.from_numpy, np.repeat(sources, sizes) + place
    return PackedBatch(
        input_ids=tensor(tokens[input_index]),
        position_ids=tensor(np.repeat(begins, sizes) + place),
        segment_ids=tensor(np.repeat(segments, sizes)),
        cu_seqlens=tensor(np.append(runs[:-1][of_prompt], runs[-1]).astype(np.int32)),
        loss_index=tensor(loss_index),
        targets=tensor(table.token_ids.numpy()[token_index]),
        sequence_ids=tensor(sequence_ids),
        group_ids=tensor(np.unique(table.compared.numpy()[rows], return_inverse=True)[1][sequence_ids]),
        num_sequences=len(rows),
        rows=tensor(rows),
        token_index=tensor(token_index),
        images=tuple(images[row] for row in rows[first].tolist()) if images else (),
        input_index=tensor(input_index),
    )
