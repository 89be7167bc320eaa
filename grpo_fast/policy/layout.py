"""Which tokens of a packed batch attend to which, and runs of tokens as padded rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_fast.policy.packing import PackedBatch

PAIRS_A_CALL = 2**14
"""Pairs of tokens that SDPA computes in about the time of one more call."""
LEAST_FILLED = 0.75  # shortest row of a batch, as a share of the longest
FEW_TOKENS = 16  # rows of a batch may always differ by so much


class Piece(NamedTuple):
    """One SDPA call: a prompt with its first completion, other completions, or several of these."""

    tokens: int
    prompt: int  # tokens of the prompt before them
    runs: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that SDPA computes, masked or not."""
        return self.tokens * (self.prompt + self.tokens)


@dataclass(frozen=True)
class Sequences:
    """The S pieces of a batch for flash-attention. The last query of a piece is at its last key."""

    index: Tensor  # (K,) int64 into T: the keys, a prompt's once for each of its pieces
    queries: Tensor  # (S + 1,) int32: where the queries of each begin, and T
    keys: Tensor  # (S + 1,) int32: where the keys of each begin, and K
    longest_queries: int
    longest_keys: int


class PackedLayout:
    """Which tokens of a packed batch attend to which. Layers with one window share masks.

    Args:
        batch: the packed batch.
        attention: as `resolve_attention` returns it.
        both_ways: (T,) int64: tokens of one number other than -1 see each other both ways, only by SDPA.

    Attributes:
        windows: sliding windows of the layers that have used the layout.
        experts: (T, L, k) replayed experts of T tokens in L layers, or None.
    """

    def __init__(self, batch: PackedBatch, attention: str, both_ways: Tensor | None = None) -> None:
        self.attention = attention
        self.windows: set[int | None] = set()
        self._both_ways = both_ways
        self.experts: Tensor | None = None
        self._batch = batch
        counts = batch.cu_seqlens.diff()
        documents = torch.arange(len(counts), device=counts.device)
        self._document_ids = documents.repeat_interleave(counts, output_size=len(batch.input_ids))
        self._masks: dict[int | None, list[Tensor | None]] = {}

    @property
    def _tokens(self) -> Tensor:
        return torch.arange(len(self._document_ids), device=self._document_ids.device)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The runs of tokens, one per call."""
        positions = self._batch.position_ids
        starts = (positions.diff(prepend=positions.new_tensor([-2])) != 1).nonzero()[:, 0]
        bounds, prompts = [*starts.tolist(), len(positions)], positions[starts].tolist()
        pieces: list[Piece] = []
        for (start, end), prompt in zip(pairwise(bounds), prompts, strict=True):
            run = Piece(end - start, prompt)
            if prompt and self.attention == "sdpa":  # it continues the previous document
                last = pieces[-1]
                both = Piece(last.tokens + run.tokens, last.prompt, last.runs + 1)
                if both.pairs <= last.pairs + run.pairs + PAIRS_A_CALL:
                    run = both
                    pieces.pop()
            pieces.append(run)
        return pieces

    @cached_property
    def _runs(self) -> list[tuple[int, int, bool]]:
        """Start and end of each prompt and each completion, and whether it is a prompt."""
        segments = self._batch.segment_ids
        key = self._document_ids * (segments.max() + 1) + segments
        starts = (key.diff(prepend=key.new_tensor([-1])) != 0).nonzero()[:, 0]
        bounds, prompts = [*starts.tolist(), len(key)], (segments[starts] == 0).tolist()
        return [(*ends, prompt) for ends, prompt in zip(pairwise(bounds), prompts, strict=True)]

    @cached_property
    def prompt_rows(self) -> RowLayout:
        """One row for each document's prompt, padded on the left."""
        return self._rows(prompts=True)

    @cached_property
    def completion_rows(self) -> RowLayout:
        """One row for each completion that has inputs; a row of one token would be a decoding step."""
        return self._rows(prompts=False)

    def _rows(self, *, prompts: bool) -> RowLayout:
        runs = [(start, end - start) for start, end, is_prompt in self._runs if is_prompt == prompts]
        starts, lengths = zip(*runs, strict=True) if runs else ((), ())
        device, least = self._document_ids.device, 1 if prompts else 2
        return RowLayout(starts, lengths, device, pads="left" if prompts else "right", least=least)

    @cached_property
    def prompt_places(self) -> Tensor:
        """Index (completions with inputs,) int64 of each completion's prompt in `prompt_rows`."""
        starts = [start for start, _, is_prompt in self._runs if not is_prompt]
        return self.prompt_rows.runs.argsort()[self._document_ids[starts]]

    @cached_property
    def row_order(self) -> Tensor:
        """Index (T,) int64 of each token in the joined rows of prompts and completions."""
        return torch.cat([self.prompt_rows.tokens, self.completion_rows.tokens]).argsort()

    def own(self, tokens: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
        """Split into the tokens of each piece."""
        return tokens.split([piece.tokens for piece in self.pieces], dim)

    def seen(self, tokens: Tensor, dim: int = 2) -> Iterator[Tensor]:
        """Yield the tokens that each piece attends to: its document's prompt and its own."""
        first = tokens
        for own, piece in zip(self.own(tokens, dim), self.pieces, strict=True):
            first = first if piece.prompt else own
            yield torch.cat([first.narrow(dim, 0, piece.prompt), own], dim) if piece.prompt else own

    @cached_property
    def sequences(self) -> Sequences:
        counts = [piece.tokens for piece in self.pieces]
        keys = [piece.tokens + piece.prompt for piece in self.pieces]

        def bounds(lengths: list[int]) -> Tensor:
            return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self._document_ids.device)

        index = torch.cat([*self.seen(self._tokens, 0)])
        return Sequences(index, bounds(counts), bounds(keys), max(counts), max(keys))

    def visible(self, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        """Return whether the token at index `query` attends to that at index `key`; indices broadcast."""
        documents, segments = self._document_ids, self._batch.segment_ids
        seen = key <= query
        if self._both_ways is not None:
            seen = seen | ((self._both_ways[query] == self._both_ways[key]) & (self._both_ways[query] >= 0))
        seen &= documents[query] == documents[key]
        seen &= (segments[key] == 0) | (segments[query] == segments[key])
        if window is not None:
            seen = seen & (self._batch.position_ids[query] - self._batch.position_ids[key] < window)
        return seen

    def masks(self, window: int | None) -> list[Tensor | None]:
        """Return for each piece a bool mask (its tokens, tokens seen), or None if it is causal."""
        if window not in self._masks:
            tokens = self._tokens
            masks: list[Tensor | None] = []
            for piece, own, seen in zip(self.pieces, self.own(tokens, 0), self.seen(tokens, 0), strict=True):
                alone = piece.prompt == 0 and piece.runs == 1
                causal = alone and (window is None or len(own) <= window) and self._both_ways is None
                masks.append(None if causal else self.visible(own[:, None], seen, window))
            self._masks[window] = masks
        return self._masks[window]


@dataclass(frozen=True)
class Rows:
    """One batch of `RowLayout`: B rows of L places."""

    runs: Tensor  # (B,) int64: the run of each row
    tokens: Tensor  # (B, L) int64 into the flat batch; padding repeats the run's nearest token
    mask: Tensor | None  # (B, L) bool, false for padding; None without padding


class RowLayout:
    """Runs of consecutive tokens as batches of padded rows of similar lengths.

    Args:
        starts: first token of each of R runs.
        lengths: tokens of each run, at least one.
        device: of the indices.
        pads: the side of the padding.
        least: smallest width of a row.
        together: one batch for all runs.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        *,
        pads: Literal["left", "right"],
        least: int = 1,
        together: bool = False,
    ) -> None:
        sizes, firsts = np.asarray(lengths, np.int64), np.asarray(starts, np.int64)
        self.batches: list[Rows] = []
        places, flat, order, before = [], [], [], 0  # on the host, without waiting for the device
        for runs in [np.arange(len(sizes))] if together and len(sizes) else alike(sizes):
            width = max(least, int(sizes[runs].max()))
            place = np.arange(width) - (width - sizes[runs, None] if pads == "left" else 0)
            real = (place >= 0) & (place < sizes[runs, None])
            tokens = firsts[runs, None] + place.clip(0, sizes[runs, None] - 1)
            of_rows, index, mask = (torch.from_numpy(part).to(device) for part in (runs, tokens, real))
            self.batches.append(Rows(of_rows, index, None if real.all() else mask))
            places.append(before + real.ravel().nonzero()[0])
            flat.append(tokens[real])
            order.append(runs)
            before += real.size

        def joined(parts: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])).to(device)

        self.tokens = joined(flat)  # (T,) int64: the flat token of each result of `join`
        self.runs = joined(order)  # (R,) int64: the run of each row, in the order of the batches
        self._places = joined(places)  # (T,) int64 into the batches' places

    def join(self, results: Sequence[Tensor]) -> Tensor:
        """Join (B, L, ...) of each batch to (T, ...) without padding, in the order of `tokens`."""
        return torch.cat([result.flatten(0, 1) for result in results]).index_select(0, self._places)


def alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the runs of each batch, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    batches: list[list[int]] = []
    longest = 0
    for run in order.tolist():
        if not batches or lengths[run] < min(LEAST_FILLED * longest, longest - FEW_TOKENS):
            batches.append([])
            longest = int(lengths[run])
        batches[-1].append(run)
    return [np.array(batch) for batch in batches]


def repeated(rows: Tensor, index: Tensor) -> Tensor:
    """Index rows (R, ...) by (K,) int64, with gradients summed in float32."""
    return _Repeated.apply(rows, index)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,), dtype = ctx.saved_tensors, torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        return total.index_add_(0, index, gradient.to(dtype)).to(gradient.dtype), None
