"""Rollout routing replay (R3, arXiv:2510.11370): an update sends tokens to the sampler's experts.

Two programs round differently, so that a router may choose other experts. With replay the trainer takes the
choice as given; the weights of the chosen experts are its own router's, so that gradients reach the router.
While a block of experts runs, the router's `torch.topk` returns the given experts and their scores.
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

_CANNOT = "leave it out: the trainer then routes by itself, and loss.sampler_correction corrects for it"


class RoutingReplay:
    """Replays choices in the packed forwards of one model, whose blocks of experts `attach` wraps.

    Choices are (T, L, k) integers for T input tokens and the model's L layers, `UNKNOWN` where the trainer
    chooses; what lies there for a layer without experts is not read.

    Attributes:
        shape: (L, k), once `verify` has seen them.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None
        self._paused = False
        self._counts: list[Tensor] = []  # of each block and forward: how many differ, of how many

    def attach(self, model: Any) -> None:
        """Raises ValueError for a model without experts."""
        self._model = model
        blocks = expert_blocks(model)
        if not blocks:
            raise ValueError(
                f"rollout.router_replay = true, and {type(model).__name__} has no experts in tensors "
                "of all, whose choice can be given; leave it out"
            )
        layers = decoder_layers(model.get_decoder())
        for number, block in blocks.items():
            layers[number].register_forward_pre_hook(
                partial(self._hand_over, number, block), with_kwargs=True
            )
            block.chosen = None
            wrap_forward(block, self._run)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model routes by itself, as a reference does, which the sampler knows nothing of."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def differing(self) -> dict[str, Tensor]:
        """Since the last call, for (token, layer) pairs in forwards with gradients: in how many the trainer
        would have chosen other experts, and of how many."""
        if not self._counts:
            return {}
        found, self._counts = torch.stack(self._counts).sum(0), []
        return {"experts/differing": found[0], "experts/replayed": found[1]}

    def _hand_over(self, number: int, block: Any, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a layer runs, also when it is recomputed for a backward, and in other forwards: None."""
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
        """Raises ValueError where experts that are given are not those that compute."""
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

        for own in chosen(None):  # of one forward, or none, where no block hands a choice on to its experts
            if (own[:, [*blocks]] == UNKNOWN).any():
                break
            others = torch.where(own == UNKNOWN, own, (own + 1) % number_of_experts(block))
            (given,) = chosen(others.to(policy.device))
            if torch.equal(given, others):
                self.shape = (own.shape[1], own.shape[2])
                return
        raise ValueError(
            f"rollout.router_replay = true, and {type(block).__name__} in layer {number} does not compute "
            f"with the experts that it is given; {_CANNOT}"
        )


class _Given(TorchFunctionMode):
    """`torch.topk` over a token's experts answers with `chosen` (T, k), where it is known."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._experts = chosen, experts
        self.counts: list[Tensor] = []  # (2,) each: how many differ, of how many

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, own = args[0], found.indices
        if own.shape != self._chosen.shape or scores.shape[-1] != self._experts:
            return found  # another choice, as of groups of experts
        known = self._chosen != UNKNOWN
        chosen = torch.where(known, self._chosen, own)
        known = known.all(-1)
        differ = known & (chosen.sort(-1).values != own.sort(-1).values).any(-1)
        self.counts.append(torch.stack([differ.sum(), known.sum()]))
        return type(found)((scores.gather(-1, chosen), chosen))


@contextmanager
def recorded(model: Any) -> Iterator[Callable[[], list[Tensor]]]:
    """Meanwhile it yields a function: the experts chosen in each forward since it was called last.

    (T, L, k) int16 on the CPU for each, T tokens in the order of its input; `UNKNOWN` for a layer without
    experts.
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
        found = [choices.cpu() for choices in forwards]
        forwards.clear()
        return found

    handles = [
        block.experts.register_forward_pre_hook(partial(note, number), with_kwargs=True)
        for number, block in blocks.items()
    ]
    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()
