"""Rollout routing replay (R3, arXiv:2510.11370): an update sends tokens to the rollout's experts.

Two programs round differently, so that a router may choose other experts. Replay fixes the choice. The
weights of the chosen experts still come from the router, which gets gradients. While a block of experts runs,
`torch.topk` returns the given experts and their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo_fast.data.table import EXPERTS, UNKNOWN, CompletionTable
from grpo_fast.policy.architecture import random_tokens
from grpo_fast.policy.experts import expert_blocks, number_of_experts
from grpo_fast.policy.layers import decoder_layers, wrap_forward
from grpo_fast.policy.packing import pack

if TYPE_CHECKING:
    from grpo_fast.policy.policy import Policy


class RoutingReplay:
    """Replays the choice of experts in the packed forwards of one model.

    Choices are (T, L, k) integers for T input tokens and L layers, `UNKNOWN` where the router chooses. Layers
    without experts ignore theirs. `shape` is (L, k) after `verify`.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None
        self._paused = False
        self._counts: list[Tensor] = []  # (2,) of each block and forward: how many differ, of how many

    def attach(self, model: Any) -> None:
        """Wrap the model's blocks of experts, or raise ValueError if it has none."""
        self._model = model
        blocks = expert_blocks(model)
        if not blocks:
            problem = f"{type(model).__name__} has no experts in one tensor"
            raise ValueError(f"rollout.router_replay = true, and {problem}; leave it out")
        layers = decoder_layers(model.get_decoder())
        for number, block in blocks.items():
            layers[number].register_forward_pre_hook(
                partial(self._hand_over, number, block), with_kwargs=True
            )
            block.chosen = None
            wrap_forward(block, self._run)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model route by itself, as a reference does."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def differing(self) -> dict[str, Tensor]:
        """Count the (token, layer) pairs replayed with gradients, and those with another own choice."""
        if not self._counts:
            return {}
        counts, self._counts = torch.stack(self._counts).sum(0), []
        return {"experts/differing": counts[0], "experts/replayed": counts[1]}

    def _hand_over(self, number: int, block: Any, layer: nn.Module, args: Any, kwargs: Any) -> None:
        # Before each forward of a layer, recomputation included.
        layout = kwargs.get("packed_layout")
        choices = None if layout is None or self._paused else layout.experts
        block.chosen = None if choices is None else choices[:, number].long()

    def _run(self, block: Any, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if block.chosen is None:
            return original_forward(*args, **kwargs)
        with _Given(block.chosen, number_of_experts(block)) as given:
            result = original_forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._counts += given.counts
        return result

    @torch.no_grad()
    def verify(self, policy: Policy) -> None:
        """Raise ValueError if the model does not compute with the given experts."""
        generator = torch.Generator().manual_seed(0)
        tokens = random_tokens(policy.base_model, 12, generator)
        table = CompletionTable.of([tokens[:5].tolist()] * 2, [tokens[5:9].tolist(), tokens[9:].tolist()])
        (batch,) = pack(table, max_tokens=100, device=policy.device)
        blocks = expert_blocks(self._model)
        number, block = next(iter(blocks.items()))

        def chosen(experts: Tensor | None) -> list[Tensor]:
            given = batch if experts is None else replace(batch, inputs={EXPERTS: experts})
            with recorded(self._model) as take:
                policy.run(lambda: policy.hidden_states(given))
            return take()

        for own in chosen(None):  # of one forward; empty if no block passes a choice to its experts
            if (own[:, [*blocks]] == UNKNOWN).any():
                break
            others = torch.where(own == UNKNOWN, own, (own + 1) % number_of_experts(block))
            (given,) = chosen(others.to(policy.device))
            if torch.equal(given, others):
                self.shape = (own.shape[1], own.shape[2])
                return
        raise ValueError(
            f"rollout.router_replay = true, and {type(block).__name__} in layer {number} does not compute "
            "with the experts that it is given; leave it out: the trainer then routes by itself, and "
            "loss.sampler_correction corrects for it"
        )


class _Given(TorchFunctionMode):
    """Makes `torch.topk` over a token's experts return `chosen` (T, k) where it is known."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._experts = chosen, experts
        self.counts: list[Tensor] = []  # (2,) each: how many differ, of how many

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, own = args[0], result.indices
        if own.shape != self._chosen.shape or scores.shape[-1] != self._experts:
            return result  # another choice, as of groups of experts
        known = self._chosen != UNKNOWN
        chosen = torch.where(known, self._chosen, own)
        known = known.all(-1)
        differ = known & (chosen.sort(-1).values != own.sort(-1).values).any(-1)
        self.counts.append(torch.stack([differ.sum(), known.sum()]))
        return type(result)((scores.gather(-1, chosen), chosen))


@contextmanager
def recorded(model: Any) -> Iterator[Callable[[], list[Tensor]]]:
    """Record the chosen experts, and yield a function that returns those of each forward since its last call.

    Each is (T, L, k) int16 on the CPU, in the order of the input; `UNKNOWN` for a layer without experts.
    """
    blocks = expert_blocks(model)
    layers = len(decoder_layers(model.get_decoder()))
    forwards: list[Tensor] = []

    def note(number: int, experts: nn.Module, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point():
                if number == min(blocks) or not forwards:
                    shape = (len(value), layers, value.shape[1])
                    forwards.append(value.new_full(shape, UNKNOWN, dtype=torch.int16))
                forwards[-1][:, number] = value

    def take() -> list[Tensor]:
        taken = [choices.cpu() for choices in forwards]
        forwards.clear()
        return taken

    handles = [
        block.experts.register_forward_pre_hook(partial(note, number), with_kwargs=True)
        for number, block in blocks.items()
    ]
    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()
