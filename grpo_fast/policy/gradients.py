"""Gradients of the trained parameters, added up in float32 over micro-batches and summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_fast.distributed.shards import local, reduce_scatter
from grpo_fast.distributed.world import World

_PIECE = 1 << 20  # elements of a gradient that a CPU converts at one time


class Gradients:
    """Gradients by the parameter's name.

    A hook moves the gradient of a 16-bit parameter into its float32 buffer during the backward.

    Attributes:
        buffers: the live float32 buffers by the parameter's name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        self._parameters = dict(parameters)
        self._world = world
        self._device = next(iter(self._parameters.values())).device
        self.buffers: dict[str, Tensor] = {}
        self._gathered: dict[str, Tensor] = {}  # buffers that hold a gradient
        for name, parameter in self._parameters.items():
            if parameter.itemsize < 4:
                buffer = torch.empty_like(local(parameter), dtype=torch.float32, requires_grad=False)
                self.buffers[name] = buffer
                parameter.register_post_accumulate_grad_hook(_absorb_into(self._gathered, name, buffer))

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor to which a backward may add the parameter's gradient, at first zero.

        None if the parameter is not trained, or if another hook waits for its gradient.
        """
        name = next((name for name, own in self._parameters.items() if own is parameter), None)
        if name is None:
            return None
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        if hooks > (name in self.buffers):
            return None
        if name in self.buffers:
            if name not in self._gathered:
                self._gathered[name] = self.buffers[name].zero_()
            return self._gathered[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local(parameter.grad)

    def clear(self) -> None:
        self._gathered.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def summed(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's rows, summed over the ranks."""
        found = {
            name: local(gradient)
            for name, parameter in self._parameters.items()
            if (gradient := self._gathered.get(name, parameter.grad)) is not None
        }
        whole = self.whole_parameters()
        if not whole:
            return found
        reached = torch.tensor([name in found for name in whole], dtype=torch.float32, device=self._device)
        names = [n for n, count in zip(whole, self._world.sum(reached).tolist(), strict=True) if count]
        for name in names:
            if name not in found:  # experts that no token of this rank visited
                dtype = torch.float32 if name in self.buffers else None
                found[name] = torch.zeros_like(whole[name], dtype=dtype)
        rows = reduce_scatter([found[name] for name in names], self._world)
        return found | dict(zip(names, rows, strict=True))

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return the live parameters of which every rank holds all rows and updates some."""
        if self._world.size == 1:
            return {}
        return {n: p.detach() for n, p in self._parameters.items() if not isinstance(p, DTensor)}


def _absorb_into(gathered: dict[str, Tensor], name: str, buffer: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that moves a gradient into its float32 buffer.

    The hook must not reference `Gradients`: the garbage collector does not see a parameter's hooks.
    """

    def absorb(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient, parameter.grad = local(parameter.grad), None
        if name not in gathered:
            gathered[name] = buffer.copy_(gradient)
            return
        total = gathered[name]
        if total.is_cuda or total.ndim == 0:
            total.add_(gradient)
            return
        # A CPU converts 16 bits to float32 before it adds them: large gradients in pieces.
        pieces = max(1, -(-total.numel() // _PIECE))
        for part, more in zip(total.tensor_split(pieces), gradient.tensor_split(pieces), strict=True):
            part.add_(more)

    return absorb
