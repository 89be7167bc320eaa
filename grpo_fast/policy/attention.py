"""Attention over packed documents, as one more attention implementation of transformers.

A dense mask over a micro-batch of T tokens costs T² however short its documents are. Here a token is not
compared with what it cannot see: an SDPA call for each completion but the short ones, one FlexAttention call
whose block mask skips the rest, or one call of the FlashAttention-2 that torch ships, so that a shared prompt
saves its tokens and costs nothing. All know the sliding window of a layer, which a ready-made 4-D mask
cannot, being the same for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from grpo_fast.policy.rows import RowLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedConfig

    from grpo_fast.policy.packing import PackedBatch

PACKED_ATTENTION = "grpo_fast_packed"  # the name under which transformers finds `packed_attention`
PRICED_ATTENTION = "grpo_fast_priced"  # and `priced_attention`
SOFTCAP_BYTES_PER_SCORE = 18
"""Transient bytes of each attention score of one sequence with a softcap (measured on a CPU; Gemma 2 within
7 %)."""
BLOCK = 128  # tokens of a block of FlexAttention's mask, its default
ALIGNMENT = 8  # numbers of a head, of which SDPA's kernels for GPUs want a multiple
_GRAPHS = 64
"""Forms of FlexAttention that torch may compile: one block or many, one document or many, a window,
a gradient. Its own limit is eight; past it, FlexAttention runs uncompiled with T² scores in memory."""

PAIRS_A_CALL = 2**14
"""Pairs of tokens that SDPA computes in the time of one more call, about: short completions share one."""

Range = tuple[Tensor, Tensor]
"""(T,) int64 each: every token sees the tokens from the first index up to the second, which it does not."""


class Piece(NamedTuple):
    """A run of positions: a prompt with its first completion, or another completion. Or several of these."""

    tokens: int
    prompt: int  # tokens of the prompt that it sees before its own
    runs: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that a call of SDPA computes, masked or not."""
        return self.tokens * (self.prompt + self.tokens)


@dataclass(frozen=True)
class Sequences:
    """The S pieces of a batch as flash-attention takes them: queries, and keys that end with their own."""

    index: Tensor  # (K,) int64 into T: the keys, a prompt's once for each of its pieces
    queries: Tensor  # (S + 1,) int32: where the queries of each begin, and T
    keys: Tensor  # (S + 1,) int32: where the keys of each begin, and K
    longest_queries: int
    longest_keys: int


class PackedLayout:
    """Which tokens of a packed batch attend to which. Masks are made once for each window, not each layer."""

    def __init__(self, batch: PackedBatch, attention: str, both_ways: Tensor | None = None) -> None:
        """
        Args:
            attention: as `resolve_attention` gives it; flash-attention does not see both ways.
            both_ways: (T,) int64: tokens of one number other than -1 see each other both ways; none: none do.
        """
        self.attention = attention
        self.windows: set[int | None] = set()  # of the layers that have asked
        self._both_ways = both_ways
        self.experts: Tensor | None = None  # (T, L, k) that are given, of T tokens in L layers
        self._batch = batch
        counts = batch.cu_seqlens.diff()
        documents = torch.arange(len(counts), device=counts.device)
        self._document_ids = documents.repeat_interleave(counts, output_size=len(batch.input_ids))
        self._masks: dict[int | None, list[Tensor | None]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @property
    def _tokens(self) -> Tensor:
        return torch.arange(len(self._document_ids), device=self._document_ids.device)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The runs of tokens of one call each; FlexAttention needs none of it, nor a wait for the device."""
        positions = self._batch.position_ids
        starts = (positions.diff(prepend=positions.new_tensor([-2])) != 1).nonzero()[:, 0]
        bounds, prompts = [*starts.tolist(), len(positions)], positions[starts].tolist()
        pieces: list[Piece] = []
        for (start, end), prompt in zip(pairwise(bounds), prompts, strict=True):
            run = Piece(end - start, prompt)
            if prompt and self.attention == "sdpa":  # it goes on with the document before
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
        """Each document's prompt, a row each, which all end in the last place."""
        return self._rows(prompts=True)

    @cached_property
    def completion_rows(self) -> RowLayout:
        """Each completion that has inputs, a row each, of two places at least: one is a decoding step."""
        return self._rows(prompts=False)

    def _rows(self, *, prompts: bool) -> RowLayout:
        runs = [(start, end - start) for start, end, is_prompt in self._runs if is_prompt == prompts]
        starts, lengths = zip(*runs, strict=True) if runs else ((), ())
        device, least = self._document_ids.device, 1 if prompts else 2
        return RowLayout(starts, lengths, device, pads="left" if prompts else "right", least=least)

    @cached_property
    def prompt_of(self) -> Tensor:
        """(completions with inputs,) int64: the number of each one's prompt."""
        starts = [start for start, _, is_prompt in self._runs if not is_prompt]
        return self._document_ids[starts]

    def own(self, tokens: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
        """The tokens of each piece."""
        return tokens.split([piece.tokens for piece in self.pieces], dim)

    def seen(self, tokens: Tensor, dim: int = 2) -> Iterator[Tensor]:
        """The tokens that each piece looks at: its own, and before them the prompt of its document."""
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
        """Whether the token at index `query` attends to the one at index `key`; the indices broadcast."""
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
        """For each piece a bool mask of its tokens × those it looks at; None where it is plainly causal."""
        if window not in self._masks:
            tokens = self._tokens
            masks: list[Tensor | None] = []
            for piece, own, seen in zip(self.pieces, self.own(tokens, 0), self.seen(tokens, 0), strict=True):
                alone = piece.prompt == 0 and piece.runs == 1
                causal = alone and (window is None or len(own) <= window) and self._both_ways is None
                masks.append(None if causal else self.visible(own[:, None], seen, window))
            self._masks[window] = masks
        return self._masks[window]

    def block_mask(self, window: int | None) -> BlockMask:
        """FlexAttention's mask over the whole batch: what `create_block_mask` makes of `visible`.

        That asks every pair of tokens, which takes about ten bytes for each of T². Here the pairs that see
        each other in a block are counted from two numbers a token: memory and work grow as T + (T/128)².
        """
        from torch.nn.attention.flex_attention import BlockMask

        if window not in self._block_masks:
            pairs = visible_pairs(self.ranges(window))[None, None]
            full = pairs == BLOCK * BLOCK
            total = len(self._document_ids)
            self._block_masks[window] = BlockMask.from_kv_blocks(
                *_listed((pairs > 0) & ~full),
                *_listed(full),
                BLOCK_SIZE=BLOCK,
                mask_mod=lambda _batch, _head, query, key: self.visible(query, key, window),
                seq_lengths=(total, total),
            )
        return self._block_masks[window]

    def ranges(self, window: int | None) -> list[Range]:
        """What `visible` says: a token sees its own segment up to itself or the end of its run, and the
        prompt before that."""
        tokens, positions = self._tokens, self._batch.position_ids
        of_documents = self._batch.cu_seqlens[:-1].long()
        document = of_documents[self._document_ids]
        in_prompt = self._batch.segment_ids == 0
        lengths = torch.zeros_like(of_documents).index_add_(0, self._document_ids, in_prompt.long())
        prompt = lengths[self._document_ids]
        # A completion's positions go on from its prompt's; a prompt has no prompt before it.
        segment = torch.where(in_prompt, document, tokens - positions + prompt)
        prompt_end = torch.where(in_prompt, document, document + prompt)
        first_of_prompt = _within(window, document, document + positions).minimum(prompt_end)
        return [(_within(window, segment, tokens), self._end(tokens)), (first_of_prompt, prompt_end)]

    def _end(self, tokens: Tensor) -> Tensor:
        """The first key after those of its own segment that each token sees."""
        if self._both_ways is None:
            return tokens + 1
        last = tokens.new_zeros(len(tokens) + 1).scatter_reduce(0, self._both_ways + 1, tokens, "amax")
        return torch.where(self._both_ways < 0, tokens, last[self._both_ways + 1]) + 1


def _within(window: int | None, first: Tensor, place: Tensor) -> Tensor:
    """The first key seen: `first`, or later, where the window that ends at `place` begins."""
    return first if window is None else first.maximum(place - window + 1)


def visible_pairs(ranges: Sequence[Range]) -> Tensor:
    """(n, n) int32, n = ceil(T / BLOCK): how many pairs of each block of queries and of keys are seen.

    Of the keys below b, block k holds clamp(b - BLOCK·k, 0, BLOCK), which as a function of k changes in two
    places. Those changes are summed over the queries of a block first, then along k: nothing is of size T·n.
    A token's own ranges must not overlap.
    """
    starts = ranges[0][0]
    blocks = -(-len(starts) // BLOCK)
    steps = torch.zeros(blocks, blocks + 2, dtype=torch.int32, device=starts.device)
    row = torch.arange(len(starts), device=starts.device) // BLOCK * steps.shape[1]
    for start, end in ranges:
        for bound, sign in ((end, 1), (start, -1)):
            place, rest = row + bound // BLOCK, (bound % BLOCK).to(torch.int32)
            steps.view(-1).index_add_(0, place, rest - BLOCK, alpha=sign)
            steps.view(-1).index_add_(0, place + 1, rest, alpha=-sign)
    return steps.cumsum(1, dtype=torch.int32)[:, :blocks]


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries the number of chosen blocks of keys, and all indices, chosen ones first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, A, T, D), key and value (B, K, T, D) -> (B, T, A, D).

    Without a layout (generation) this is transformers' SDPA, with the score softcap of Gemma 2 and the sinks
    of gpt-oss honoured.
    """
    sinks: Tensor | None = kwargs.get("s_aux")
    chosen = None
    if packed_layout is not None:
        chosen = packed_layout.attention
        packed_layout.windows.add(sliding_window)
    if packed_layout is None and softcap is None and sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if packed_layout is None:
        return _attend(query, key, value, attention_mask, scaling, softcap, sinks).transpose(1, 2), None
    if chosen == "flex_attention":
        from transformers.integrations.flex_attention import flex_attention_forward

        mask = packed_layout.block_mask(sliding_window)
        with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
            output, _ = flex_attention_forward(
                module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=sinks
            )
        return output, None
    if chosen == "flash_attention_2" and softcap is None and sinks is None:
        return _flash(query, key, value, packed_layout.sequences, scaling, sliding_window), None
    pieces = (packed_layout.own(query), packed_layout.seen(key), packed_layout.seen(value))
    outputs = [
        _attend(*piece, scaling, softcap, sinks)
        for piece in zip(*pieces, packed_layout.masks(sliding_window), strict=True)
    ]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scaling: float | None, window: int | None
) -> Tensor:
    """(1, A, T, D) and twice (1, K, T, D) -> (1, T, A, D), in 16 bits on a GPU."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if len(sequences.index) > len(query):
        key, value = (repeated(tensor, sequences.index) for tensor in (key, value))
    output, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        sequences.queries,
        sequences.keys,
        max(2, sequences.longest_queries),  # torch takes 1 for the decoding of one token a sequence
        sequences.longest_keys,
        0.0,
        True,  # causal, the last query at the last key
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return output[None]


def repeated(rows: Tensor, index: Tensor) -> Tensor:
    """(R, ...) and (K,) int64 -> (K, ...): rows, some several times, their gradients summed in float32."""
    return _Repeated.apply(rows, index)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,), wide = ctx.saved_tensors, torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=gradient.device)
        return total.index_add_(0, index, gradient.to(wide)).to(gradient.dtype), None


def priced_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """`packed_attention` of no numbers, on the meta device: what bytes are counted with."""
    return _Priced.apply(query, key, value), None


class _Priced(torch.autograd.Function):
    """Keeps what every fused attention does: its operands, its result, and a number a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens = query.shape[:3]
        result = value.new_empty(batch, tokens, heads, value.shape[-1])
        of_rows = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, of_rows)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        raise NotImplementedError("there is nothing to differentiate on the meta device")


class PackedPrice(NamedTuple):
    """Bytes of one layer's attention beyond `priced_attention`'s."""

    kept: int
    transient: int


def price(
    attention: str,
    *,
    tokens: int,
    joined: int,
    copied: int,
    masked: int,
    scores: int,
    largest: int,
    heads: int,
    head_dim: int,
    kv_numbers: int,
    itemsize: int,
    softcap: bool,
    sinks: bool,
) -> PackedPrice:
    """Of `packed_attention` in a micro-batch.

    Args:
        attention: as `resolve_attention` gives it.
        tokens: of the micro-batch.
        joined: keys that are copied for completions that share a prompt: the prompt's.
        copied: these, and the completions' own behind them.
        masked: elements of SDPA's masks.
        scores: pairs of a query and a key that SDPA looks at, and `largest` those of one call.
        kv_numbers: of a token's keys and values.
    """
    if attention == "flex_attention":
        return PackedPrice(0, 0)
    if attention == "flash_attention_2":  # queries' gradients in float32; keys' and values' for every head
        per_head = 2 * itemsize * heads * head_dim * (tokens + joined)
        return PackedPrice(itemsize * kv_numbers * joined, per_head + 4 * tokens * heads * head_dim)
    if sinks:  # beside which all keys and values are copied, and queries
        copied = tokens + joined
    kept = itemsize * (kv_numbers * copied + heads * head_dim * tokens)  # the pieces' results are joined
    if not softcap:
        kept += itemsize * heads * head_dim * tokens * sinks
        return PackedPrice(kept + itemsize * masked, 0)  # masks are converted for each layer anew
    kept += itemsize * 2 * heads * head_dim * (tokens + copied)  # keys and values for every head
    per_score = 2 * 4 + (itemsize if itemsize < 4 else 0)
    return PackedPrice(kept + heads * scores * per_score, heads * largest * SOFTCAP_BYTES_PER_SCORE)


def flash_obstacle(config: PreTrainedConfig) -> str | None:
    """Why torch's flash-attention cannot compute this model's attention; None: it can."""
    text = config.get_text_config()
    for found in head_dims(text):
        if found > 256 or found % 8:
            return f"the model's heads have {found} numbers, not a multiple of 8 up to 256"
    if getattr(text, "v_head_dim", None) is not None:
        return "the model's values are not as wide as its keys"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "the model caps its scores"
    return "the model has attention sinks" if has_sinks(config) else None


def head_dims(text: PreTrainedConfig) -> set[int]:
    """Numbers of a query or key of one head, of each kind of layer; 0 of those without heads."""
    found: set[int] = set()
    for layer in getattr(text, "per_layer_config", None) or [text]:  # Gemma 4's differ
        heads = getattr(layer, "num_attention_heads", 0)  # Mamba has none
        size = heads and (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
        found |= {size, getattr(layer, "global_head_dim", None) or size}
    return found


def has_sinks(config: PreTrainedConfig) -> bool:
    """Whether the layers hand a score beside those of the keys to their attention, of which SDPA has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is not None and not model._supports_sdpa


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one piece; a mask of None is causal, or everything for a single query.

    Args:
        sinks: (A,) a score of each head beside those of the keys, of no value.
    """
    causal = mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and sinks is not None:
        return _attend_with_sinks(query, key, value, mask, scale, sinks, causal)
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        beside = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, beside], -1)
    return scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype) @ value


def _attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor,
    causal: bool,
) -> Tensor:
    """By SDPA without a softcap: the sink is one more key, in front, whose value is zero.

    In numbers more of a query and a key, which are zero of all other keys, the product of these two is the
    head's sink. So no score is kept, and autograd knows the sinks' gradient.
    """
    width, of_value = query.shape[-1], value.shape[-1]
    wide = -(-max(width + 1, of_value) // ALIGNMENT) * ALIGNMENT  # all as wide, or SDPA keeps every score
    beside = sinks.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    first_key = key.new_zeros(wide)
    first_key[width] = 1 / scale
    # With a query in front as well, which looks at the sink alone, the diagonal of a causal mask stays.
    query = pad(torch.cat([query, beside], -1), (0, wide - width - 1, int(causal), 0))
    key = torch.cat([first_key.expand(*key.shape[:2], 1, wide), pad(key, (0, wide - width))], 2)
    value = pad(value, (0, wide - of_value, 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=float(mask.dtype == torch.bool))  # or it is added to the scores
    output = _attend(query, key, value, mask, scale, None, None)
    return output[:, :, int(causal) :, :of_value]


def register() -> None:
    """Make our attentions known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # FlexAttention is compiled by itself, whatever is compiled around it.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    AttentionInterface.register(PRICED_ATTENTION, priced_attention)
    for name in (PACKED_ATTENTION, PRICED_ATTENTION):
        AttentionMaskInterface.register(name, sdpa_mask)
