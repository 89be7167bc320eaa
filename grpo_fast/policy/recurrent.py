"""Recurrent layers over packed documents: the prompt's state is computed once.

A recurrent mixer (gated delta rule, Mamba, short convolution, linear attention) runs twice: over the
prompts of a batch, and over the completions, each of which begins with a copy of its prompt's state.
transformers' own module computes both; its cache is a `StateCache`, which keeps what a backward needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo_fast.policy.layers import decoder_layers, wrap_forward
from grpo_fast.policy.layout import PackedLayout, RowLayout, repeated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_WRITES = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
"""What mixers of transformers call to leave a state in their cache."""
_CACHES = frozenset({"cache", "cache_params", "past_key_values"})  # the argument that is it
_MASKS = frozenset({"attention_mask", "conv_mask"})  # and the one that tells padding, (B, L)

States = dict[tuple[str, int], Tensor]
"""(B, ...) each, by kind and number: what one mixer knows of the tokens before."""


def keep_step_limits(model: PreTrainedModel) -> None:
    """Keep time steps of Mamba 2 within the configuration's `time_step_limit`, as a model's authors do.

    transformers' Nemotron-H takes `time_step_min` instead, which bounds the steps of first weights alone
    (its pull request 48989).
    """
    limit = getattr(model.config.get_text_config(), "time_step_limit", None)
    mixers: list[Any] = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    if limit is not None:
        for mixer in mixers:
            mixer.time_step_limit = tuple(limit)


class StateCache:
    """transformers' cache as one mixer sees it, with states that have gradients.

    Args:
        states: before the first token; none: there is nothing before it.
    """

    record_past = True  # else a convolution of one token changes its state in place

    def __init__(self, states: States | None) -> None:
        self.states: States = dict(states or {})
        self._begun = states is not None

    @property
    def layers(self) -> StateCache:
        return self

    def __getitem__(self, layer: int) -> StateCache:
        return self

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return self._of("conv")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return self._of("recurrent")

    def _of(self, kind: str) -> dict[int, Tensor]:
        return {number: state for (found, number), state in self.states.items() if found == kind}

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self._begun

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """(B, C, T) -> (B, C, K + T) with the K columns before it; the last K are kept."""
        before = self.conv_states.get(state_idx)
        kernel = conv_kernel_size or (new if before is None else before).shape[-1]
        whole = new if before is None else torch.cat([before, new], dim=-1)
        whole = pad(whole, (max(0, kernel - whole.shape[-1]), 0))
        self.states["conv", state_idx] = whole[..., -kernel:]
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states["recurrent", state_idx] = new
        return new

    def is_recording_past(self, *_: Any) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.recurrent_states.get(0)

    def set_linear_cache(self, layer_idx: int, new: Tensor) -> None:
        self.update_recurrent_state(new, layer_idx)


def recurrent_mixers(model: nn.Module) -> list[Any]:
    """The modules of a model that carry a state along the tokens."""
    return [module for module in model.modules() if _writes_state(module)]


def _writes_state(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not STATE_WRITES.isdisjoint(code.co_names)


def fork_states(model: nn.Module) -> None:
    """Let recurrent layers take packed batches; all else they compute as before."""
    for mixer in recurrent_mixers(model):
        mixer.packed_layout = None
        wrap_forward(mixer, _forked)
    for layer in decoder_layers(model):
        if mixers := recurrent_mixers(layer):
            layer.mixers = mixers
            wrap_forward(layer, _with_layout)


def _with_layout(layer: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A layer's forward, in which its mixers know the layout: few layers pass it to them."""
    outer = [mixer.packed_layout for mixer in layer.mixers]
    for mixer in layer.mixers:
        mixer.packed_layout = kwargs.get("packed_layout")
    try:
        return original_forward(*args, **kwargs)
    finally:
        for mixer, layout in zip(layer.mixers, outer, strict=True):
            mixer.packed_layout = layout


@torch.compiler.disable
def _forked(mixer: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A mixer's forward over a packed batch, of (1, T, ...): prompts first, then completions."""
    layout: PackedLayout | None = mixer.packed_layout
    if layout is None:
        return original_forward(*args, **kwargs)
    given = inspect.signature(original_forward).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    run = partial(_run, original_forward)
    prompts, completions = layout.prompt_rows, layout.completion_rows
    read = [run(_at(given, rows.tokens), rows.mask, None) for rows in prompts.batches]
    behind = {kind: torch.cat([states[kind] for _, states in read]) for kind in read[0][1]}
    places = layout.prompt_places  # of each completion's prompt among the states
    written = []
    for rows in completions.batches:
        before = {kind: repeated(state, places[rows.runs]) for kind, state in behind.items()}
        written.append(run(_at(given, rows.tokens), None, before))
    parts = [_joined(prompts, [result for result, _ in read])]
    parts += [_joined(completions, [result for result, _ in written])] if written else []
    order = layout.row_order
    outputs = tuple(
        None if found[0] is None else torch.cat(found)[order][None] for found in zip(*parts, strict=True)
    )
    return outputs if isinstance(read[0][0], tuple) else outputs[0]


def _at(given: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Arguments of (1, T, ...) as those of rows: (B, L, ...)."""
    total = next(iter(given.values())).shape[1]

    def rows(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rows, value))
        of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, total)
        return value[0][tokens] if of_tokens else value

    return {name: rows(value) for name, value in given.items()}


def _joined(layout: RowLayout, results: list[Any]) -> list[Tensor | None]:
    """What a mixer returned of each batch of rows, (B, L, ...), as (T, ...); None: it is not of tokens."""
    found: list[Tensor | None] = []
    shapes = [rows.tokens.shape for rows in layout.batches]
    results = [result if isinstance(result, tuple) else (result,) for result in results]
    for parts in zip(*results, strict=True):
        of_tokens = [part.shape[:2] for part in parts if isinstance(part, Tensor)] == shapes
        found.append(layout.join(parts) if of_tokens else None)
    return found


def _run(
    forward: Callable[..., Any], given: dict[str, Any], mask: Tensor | None, states: States | None
) -> tuple[Any, States]:
    """What a mixer returns of rows (B, L, ...) that begin with these states, and the states behind them.

    Args:
        mask: (B, L), false for padding; none: nothing is before a row's first token.
    """
    cache, names = StateCache(states), inspect.signature(forward).parameters
    given = given | dict.fromkeys(_CACHES.intersection(names), cache)
    return forward(**given | dict.fromkeys(_MASKS.intersection(names), mask)), cache.states
