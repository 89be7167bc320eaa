"""Recurrent layers over packed documents: the prompt's state is computed once.

A recurrent mixer (gated delta rule, Mamba, short convolution, linear attention) runs over the prompts of a
batch, and then over the completions, each from a copy of its prompt's state. transformers' module computes
both with a `StateCache`, whose states have gradients.
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
"""Methods of a cache by which transformers' mixers store a state."""
_CACHES = frozenset({"cache", "cache_params", "past_key_values"})  # names of the cache's argument
_MASKS = frozenset({"attention_mask", "conv_mask"})  # names of the padding mask (B, L)

States = dict[tuple[str, int], Tensor]
"""States (B, ...) of one mixer by kind and number."""


def keep_step_limits(model: PreTrainedModel) -> None:
    """Limit Mamba 2's time steps by `time_step_limit`, as the authors of Nemotron-H do.

    transformers uses `time_step_min` instead, which is for initial weights (its pull request 48989).
    """
    limit = getattr(model.config.get_text_config(), "time_step_limit", None)
    mixers: list[Any] = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    if limit is not None:
        for mixer in mixers:
            mixer.time_step_limit = tuple(limit)


class StateCache:
    """The cache of one mixer, with states that have gradients, at first those before the first token."""

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
        return {number: state for (kind, number), state in self.states.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return {number: state for (kind, number), state in self.states.items() if kind == "recurrent"}

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self._begun

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return (B, C, K + T): the K columns before `new` (B, C, T), and `new`. Keep the last K."""
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
    """Return the modules of a model that carry a state along the tokens."""
    return [module for module in model.modules() if _writes_state(module)]


def _writes_state(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not STATE_WRITES.isdisjoint(code.co_names)


def fork_states(model: nn.Module) -> None:
    """Let recurrent layers compute packed batches."""
    for mixer in recurrent_mixers(model):
        mixer.packed_layout = None
        wrap_forward(mixer, _forked)
    for layer in decoder_layers(model):
        if mixers := recurrent_mixers(layer):
            layer.mixers = mixers
            wrap_forward(layer, _with_layout)


def _with_layout(layer: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Few layers pass the layout to their mixers.
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
    """Run a mixer over a packed batch of (1, T, ...): prompts first, then completions."""
    layout: PackedLayout | None = mixer.packed_layout
    if layout is None:
        return original_forward(*args, **kwargs)
    given = inspect.signature(original_forward).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    run = partial(_run, original_forward)
    prompts, completions = layout.prompt_rows, layout.completion_rows
    of_prompts = [run(_at(given, rows.tokens), rows.mask, None) for rows in prompts.batches]
    after = {kind: torch.cat([states[kind] for _, states in of_prompts]) for kind in of_prompts[0][1]}
    of_completions = []
    for rows in completions.batches:
        places = layout.prompt_places[rows.runs]
        before = {kind: repeated(state, places) for kind, state in after.items()}
        of_completions.append(run(_at(given, rows.tokens), None, before))
    parts = [_joined(prompts, [result for result, _ in of_prompts])]
    parts += [_joined(completions, [result for result, _ in of_completions])] if of_completions else []
    order = layout.row_order
    outputs = tuple(
        None if values[0] is None else torch.cat(values)[order][None] for values in zip(*parts, strict=True)
    )
    return outputs if isinstance(of_prompts[0][0], tuple) else outputs[0]


def _at(given: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Index arguments of (1, T, ...) to rows (B, L, ...)."""
    total = next(iter(given.values())).shape[1]

    def rows(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rows, value))
        of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, total)
        return value[0][tokens] if of_tokens else value

    return {name: rows(value) for name, value in given.items()}


def _joined(layout: RowLayout, results: list[Any]) -> list[Tensor | None]:
    """Join a mixer's results of each batch of rows, (B, L, ...), to (T, ...); None for other results."""
    joined: list[Tensor | None] = []
    shapes = [rows.tokens.shape for rows in layout.batches]
    results = [result if isinstance(result, tuple) else (result,) for result in results]
    for parts in zip(*results, strict=True):
        of_tokens = [part.shape[:2] for part in parts if isinstance(part, Tensor)] == shapes
        joined.append(layout.join(parts) if of_tokens else None)
    return joined


def _run(
    forward: Callable[..., Any], given: dict[str, Any], mask: Tensor | None, states: States | None
) -> tuple[Any, States]:
    """Run a mixer on rows (B, L, ...) from these states. Returns its result, and the states after them."""
    cache, names = StateCache(states), inspect.signature(forward).parameters
    given = given | dict.fromkeys(_CACHES.intersection(names), cache)
    return forward(**given | dict.fromkeys(_MASKS.intersection(names), mask)), cache.states
