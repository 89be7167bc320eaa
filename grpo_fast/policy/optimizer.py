"""AdamW on float32 masters, with a schedule, clipping, and a state that resumes to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_fast.config.policy import OptimizerConfig, State
from grpo_fast.distributed.shards import all_gather, as_sharded, local, reduce_scatter, rows_of
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.policy.host_memory import host_like, stream_through_device, to_host

MASTER = "master."  # before a parameter's name, in the names of saved tensors
SMALLEST = 2**20  # bytes; smaller tensors stay on the device: many copies for nothing
_PIECE = 1 << 20  # numbers of a gradient that a CPU converts at one time


class Diverged(FloatingPointError):
    """Gradients or weights hold NaN or infinity."""


class PolicyOptimizer:
    """Steps the trainable parameters; owns a float32 master of each that is kept in 16 bits, with stochastic
    rounding only while its parameter is stepped.

    The gradient of a 16-bit parameter moves into its master's float32 buffer as soon as a backward has
    finished it, so that adding up over micro-batches rounds no more than one of them does. Weight decay
    leaves vectors (norms, biases) alone. Moments and masters may live in the host's memory: only `step` reads
    them, one parameter after the other. Moments of 8 bits are saved as the float32 values they stand for, so
    that an optimizer of any kind takes up the state of any other.

    Of several ranks, each has masters and moments of its own rows of every parameter. Gradients are summed
    over the ranks, in `step` or, where a parameter is itself sharded, by FSDP2; of whole parameters all ranks
    get the updated rows.

    Args:
        parameters: by name, as `Policy.trainable` gives them; they stay the model's.
        config: the run's `optimizer` section.
        total_steps: training steps of the whole run, for the schedule.
        on_host: what lives in the host's memory from the start, as `memory.offload` says; of kind
            adamw_offload everything does.
        world: the ranks that train together.

    Raises:
        ValueError: nothing to train.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        total_steps: int,
        on_host: Collection[str] = (),
        world: World = SINGLE_PROCESS,
    ) -> None:
        if not parameters:
            raise ValueError("parameters is empty: everything in the model is frozen")
        self._steps = 0
        self.mid_step = False  # whether the weights have changed since the last training step was over
        self._parameters = dict(parameters)
        self._device = next(iter(self._parameters.values())).device
        self._world = world
        self._on_host: set[State] = {*(get_args(State) if config.kind == "adamw_offload" else on_host)}
        self._masters: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}  # float32, for the gradients of 16-bit parameters
        self._gathered: dict[str, Tensor] = {}  # those of them that hold a gradient
        self._rounds = config.stochastic_rounding  # then masters of 16 bits have no memory between steps
        self._noise = torch.Generator(self._device)
        for name, parameter in self._parameters.items():
            rows = rows_of(parameter, world)
            if rows.itemsize >= 4:
                self._masters[name] = rows
                continue
            self._masters[name] = master = rows.detach().float().requires_grad_()
            buffer = torch.empty_like(local(parameter), dtype=torch.float32, requires_grad=False)
            self._buffers[name] = buffer
            parameter.register_post_accumulate_grad_hook(_absorb_into(self._gathered, name, buffer))
            if self._rounds:
                master.untyped_storage().resize_(0)
            elif self._lives_on_host("master", master):
                to_host(master)
        groups = [
            {"params": [m for m in self._masters.values() if (m.ndim >= 2) == decays], "decays": decays}
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self._adam: Any
        self._eight_bit = config.kind == "adamw_8bit"
        if self._eight_bit:
            from grpo_fast.policy.adamw_8bit import AdamW8bit

            self._adam = AdamW8bit(groups, self._device)
        else:
            self._adam = torch.optim.AdamW(groups, fused=True)
        self.configure(config, total_steps=total_steps)

    def configure(self, config: OptimizerConfig, *, total_steps: int) -> None:
        """Take over other constants and another schedule; steps and moments stay."""
        self._config = config
        self._total_steps = total_steps
        for group in self._adam.param_groups:
            decay = config.weight_decay if group["decays"] else 0.0
            group |= {"betas": config.betas, "eps": config.eps, "weight_decay": decay}

    def reset_state(self) -> None:
        """Drop the moments and begin the schedule anew; the weights stay, in full precision."""
        self._steps = 0
        self._adam.state.clear()

    @property
    def learning_rate(self) -> float:
        """The rate of every optimiser step in the coming training step.

        A linear warm-up from learning_rate / warmup_steps, then the schedule down to its floor.
        """
        config, step = self._config, self._steps
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, self._total_steps - config.warmup_steps))
        floor = 1.0 if config.schedule == "constant" else config.min_learning_rate_ratio
        left = 1.0 - progress
        if config.schedule == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.learning_rate * (floor + (1.0 - floor) * left)

    def step(self) -> float:
        """Clip, update, and forget the gradients. Returns the gradient's norm before clipping.

        Raises:
            RuntimeError: no parameter has a gradient.
            Diverged: the gradient is not finite; the weights are as before.
            torch.OutOfMemoryError: if it is for Adam's moments, weights and gradients are as before.
        """
        gradients = self._summed_gradients()
        if not gradients:
            raise RuntimeError("no parameter has a gradient; run a backward first, or skip the step")
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if self._world.size > 1:
            norm = self._world.sum(norm.double().square()).sqrt().to(norm.dtype)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self.zero_grad()
            raise Diverged(f"the gradient norm is {grad_norm}")
        self._make_moments(gradients)
        # AdamW's fused kernel divides the gradient by this as it reads it, as for a GradScaler.
        limit = self._config.max_grad_norm
        scale = None if limit is None or grad_norm <= limit else (norm + 1e-6) / limit
        self._adam.grad_scale = scale
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate
        self.zero_grad()
        self.mid_step = True
        if self._rounds and self._buffers:  # by the global generator, whose state is in checkpoints
            self._noise.manual_seed(int(torch.randint(2**62, ())))
        for names in self._streamed(gradients):
            for name in names:
                self._masters[name].grad = gradients[name]
            self._adam.step()
            for name in names:
                self._masters[name].grad = None
            self._write_back(names)
        self._exchange_rows(gradients)
        return grad_norm

    def _summed_gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's rows, summed over the ranks: of what a backward of any has reached."""
        found = {
            name: local(gradient)
            for name, parameter in self._parameters.items()
            if (gradient := self._gathered.get(name, parameter.grad)) is not None
        }
        whole = self._whole()
        if not whole:
            return found
        reached = torch.tensor([name in found for name in whole], dtype=torch.float32, device=self._device)
        names = [n for n, count in zip(whole, self._world.sum(reached).tolist(), strict=True) if count]
        for name in names:
            if name not in found:  # experts that no token of this rank went to
                found[name] = torch.zeros_like(whole[name], dtype=self._masters[name].dtype)
        rows = reduce_scatter([found[name] for name in names], self._world)
        return found | dict(zip(names, rows, strict=True))

    def _exchange_rows(self, names: Collection[str]) -> None:
        """Every rank gets the rows that the others have updated, in the model's order, which all share."""
        all_gather([tensor for name, tensor in self._whole().items() if name in names], self._world)

    def _whole(self) -> dict[str, Tensor]:
        """The parameters, live, of which several ranks update rows and each has all."""
        if self._world.size == 1:
            return {}
        return {n: p.detach() for n, p in self._parameters.items() if not isinstance(p, DTensor)}

    def _make_moments(self, names: Iterable[str]) -> None:
        """Adam's state where it is missing: all of it, so that no weight has moved if the memory runs out."""
        made = {}
        for name in names:
            master = self._masters[name]
            if self._adam.state.get(master):
                continue
            zeros = partial(self._zeros, on_host=self._lives_on_host("optimizer", master))
            if self._eight_bit:
                made[master] = self._adam.new_state(master, zeros)
            else:
                step = torch.zeros((), dtype=torch.float32, device=self._device)
                made[master] = {"step": step, "exp_avg": zeros(master), "exp_avg_sq": zeros(master)}
        self._adam.state.update(made)

    def _zeros(self, like: Tensor, *, on_host: bool) -> Tensor:
        if on_host:
            return host_like(like, pinned=self._device.type == "cuda").zero_()
        return torch.zeros_like(like, device=self._device, requires_grad=False)

    def _streamed(self, names: Iterable[str]) -> Iterator[Sequence[str]]:
        """Names whose masters and moments are on the device: all that live there, then each of the others."""
        rounded = self._buffers if self._rounds else {}
        away = {n: found for n in names if (found := self._movable(n, self._on_host)) or n in rounded}
        if stay := [name for name in names if name not in away]:
            yield stay
        visitors = [*away]
        for index in stream_through_device([*away.values()], self._device):
            if (name := visitors[index]) in rounded:
                master = self._masters[name].detach()
                master.untyped_storage().resize_(master.nbytes)
                master.copy_(rows_of(self._parameters[name], self._world).detach())
            yield [name]

    def _movable(self, name: str, states: Collection[State]) -> list[Tensor]:
        """The tensors of these states that are worth moving to the host's memory and back."""
        if self._masters[name].nbytes < SMALLEST:
            return []
        tensors = [*self._moments_of(name).values()] if "optimizer" in states else []
        if "master" in states and name in self._buffers and not self._rounds:
            tensors.append(self._masters[name])
        return [tensor for tensor in tensors if tensor.ndim]  # without torch's step

    def _moments_of(self, name: str) -> dict[str, Tensor]:
        """Adam's tensors; the tables that all 8-bit moments share are not the parameter's."""
        state = self._adam.state.get(self._masters[name], {})
        return {k: t for k, t in state.items() if torch.is_tensor(t) and not k.startswith("qmap")}

    def _lives_on_host(self, state: State, like: Tensor) -> bool:
        return state in self._on_host and like.nbytes >= SMALLEST

    def keep_on_host(self, state: State) -> None:
        """Move the moments or the masters to the host's memory for good, where they stay readable.

        In `step` they visit the device, one parameter's after the other.
        """
        if state in self._on_host:
            return
        self._on_host.add(state)
        for name in self._masters:
            for tensor in self._movable(name, [state]):
                to_host(tensor)

    def advance(self) -> None:
        """A training step is over, however many optimiser steps it took: the schedule moves on."""
        self._steps += 1
        self.mid_step = False

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Where a backward may add the parameter's gradient itself, beside what autograd brings.

        The float32 buffer of a 16-bit parameter, else its `.grad`: of its shape, zero where nothing is
        gathered yet, gone with `zero_grad`. None where no gradient is wanted, or where another's hook on the
        parameter would not hear of it.
        """
        name = next((name for name, own in self._parameters.items() if own is parameter), None)
        if name is None:
            return None
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        if hooks > (name in self._buffers):
            return None
        if name in self._buffers:
            if name not in self._gathered:
                self._gathered[name] = self._buffers[name].zero_()
            return self._gathered[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local(parameter.grad)

    def zero_grad(self) -> None:
        """Forget the gradients gathered so far."""
        self._gathered.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What of the state fits into JSON."""
        return {"steps": self._steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and moments under `KIND.PARAMETER`: with `state`, all that a resumed run needs.

        The tensors are live, or copies on the host of what is kept in fewer bits; save them before the next
        step. Of several ranks, each is a DTensor of all rows.
        """
        tensors = {}
        for name, master in self._masters.items():
            moments = self._adam.values(master) if self._eight_bit else self._moments_of(name)
            if self._rounds and name in self._buffers:
                master = rows_of(self._parameters[name], self._world).to("cpu", torch.float32)
            state = {"master": master.detach()} | moments
            for kind, rows in state.items():
                shape = self._parameters[name].shape
                tensors[f"{kind}.{name}"] = as_sharded(rows, shape, self._world) if rows.ndim else rows
        return tensors

    def moments(self) -> dict[str, Tensor]:
        """Adam's state of this rank's rows, live, by `KIND.PARAMETER`; empty before the first step."""
        return {f"{kind}.{n}": t for n in self._masters for kind, t in self._moments_of(n).items()}

    def masters(self) -> dict[str, Tensor]:
        """The float32 masters of 16-bit parameters that outlive a step, live, by the parameter's name."""
        return {} if self._rounds else {name: self._masters[name] for name in self._buffers}

    def gradient_buffers(self) -> dict[str, Tensor]:
        """What the masters' gradients are gathered in: worth nothing between steps."""
        return dict(self._buffers)

    @torch.no_grad()
    def load_state_tensors(
        self, saved: Mapping[str, Tensor], read: Callable[[Mapping[str, Tensor]], object]
    ) -> None:
        """Take over what `state_tensors` gave, and set the model's trainable weights from the masters.

        Args:
            saved: by name; only their shapes are asked for.
            read: fills tensors of these names.

        Raises:
            ValueError: tensors of another model: one is missing, unknown or has another shape.
        """
        self._adam.state.clear()
        self._make_moments([name for name in self._masters if f"exp_avg.{name}" in saved])
        tensors = self.state_tensors()
        require_same_shapes("the optimiser's tensors", saved, tensors)
        read(tensors)
        for name, master in self._masters.items():
            if self._eight_bit and self._adam.state.get(master):
                kinds = ("step", "exp_avg", "exp_avg_sq")
                self._adam.take(master, {kind: local(tensors[f"{kind}.{name}"]) for kind in kinds})
        for name in self._buffers:
            rows_of(self._parameters[name], self._world).copy_(local(tensors[MASTER + name]))
        self._exchange_rows(self._masters)

    @torch.no_grad()
    def _write_back(self, names: Iterable[str]) -> None:
        """The parameters of 16 bits become what their masters are."""
        in_16_bits = [name for name in names if name in self._buffers]
        masters = [self._masters[name] for name in in_16_bits]
        if self._rounds:
            for master in masters:
                round_to_bfloat16(master, self._noise)
        if in_16_bits:  # in few launches
            own = [rows_of(self._parameters[name], self._world) for name in in_16_bits]
            torch._foreach_copy_(own, masters)
        if self._rounds:
            for master in masters:
                master.untyped_storage().resize_(0)


def round_to_bfloat16(values: Tensor, noise: torch.Generator) -> None:
    """Round float32 values in place, up or down by a chance that leaves their mean as it is.

    So that steps far smaller than bfloat16's add up (Zamirai et al. 2020, arXiv:2010.06192).
    """
    bits = values.detach().view(torch.int32)  # of which bfloat16 keeps the upper 16
    chance = torch.empty(bits.shape, dtype=torch.int16, device=bits.device)
    bits.add_(chance.random_(-(2**15), 2**15, generator=noise)).add_(2**15).bitwise_and_(-(2**16))


def require_same_shapes(what: str, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises ValueError where `saved` does not have the names and shapes of the model's tensors."""
    found = {name: tensor.shape for name, tensor in saved.items()}
    expected = {name: tensor.shape for name, tensor in wanted.items()}
    if wrong := sorted(name for name in {*saved, *wanted} if found.get(name) != expected.get(name)):
        raise ValueError(
            f"{what} do not belong to this model: {wrong[0]!r} and {len(wrong) - 1} more are missing, "
            "unknown or of another shape; load them with the configuration they were saved with"
        )


def _absorb_into(gathered: dict[str, Tensor], name: str, buffer: Tensor) -> Callable[[Tensor], None]:
    """A hook that moves a finished gradient into its float32 buffer, which outlives the steps.

    The hook must not know the optimizer: no garbage collector sees through a parameter's hooks.
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
        # A CPU makes 16 bits float32 before it adds them: those of a large gradient in pieces.
        pieces = max(1, -(-total.numel() // _PIECE))
        for part, more in zip(total.tensor_split(pieces), gradient.tensor_split(pieces), strict=True):
            part.add_(more)

    return absorb
