"""AdamW on float32 masters, with a schedule, clipping, and a state that resumes bit-equal."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, get_args

import torch
from torch import Tensor, nn

from grpo_fast.config.lookup import choices
from grpo_fast.config.policy import OptimizerConfig, State
from grpo_fast.distributed.shards import all_gather, as_sharded, local, rows_of
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.policy.gradients import Gradients
from grpo_fast.policy.host_memory import on_device, to_host

MASTER = "master."  # prefix of a parameter's name in the names of saved tensors
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK_8BIT, LEAST_8BIT = 256, 4096  # elements of a block, and of the smallest tensor with moments in 8 bits
SMALLEST = 2**20  # bytes; smaller tensors are not worth a copy to the host


class Diverged(FloatingPointError):
    """Gradients or weights hold NaN or infinity."""


class PolicyOptimizer:
    """Steps the trainable parameters, with a float32 master of each 16-bit one.

    Gradients of micro-batches add up in float32 (`Gradients`). Vectors (norms, biases) have no weight decay.
    torchao implements 8-bit moments and stochastic rounding, which replaces the masters. 8-bit moments are
    saved as float32, so that an optimizer of any kind loads the state of any other.

    Each of several ranks has masters and moments of its rows of every parameter. `step`, or FSDP2 for sharded
    parameters, sums gradients over the ranks. All ranks get the updated rows of whole parameters.

    Args:
        parameters: by name, as `Policy.trainable` returns them.
        config: the run's `optimizer` section.
        total_steps: training steps of the whole run, for the schedule.
        on_host: states in host memory from the start, as `memory.offload`; adamw_offload: all of them.
        world: the ranks that train together.

    Raises:
        ValueError: nothing to train.
        ImportError: torchao is needed and missing.
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
        self._factor = 1.0  # times the scheduled rate
        self.mid_step = False  # whether weights have changed since the last training step ended
        self._parameters = dict(parameters)
        self._device = next(iter(self._parameters.values())).device
        self._world = world
        self._on_host: set[State] = {*(get_args(State) if config.kind == "adamw_offload" else on_host)}
        self._masters: dict[str, Tensor] = {}
        self._gradients = Gradients(self._parameters, world)
        self._rounds = config.stochastic_rounding  # 16-bit parameters are their own masters
        for name, parameter in self._parameters.items():
            self._masters[name] = rows = rows_of(parameter, world)
            if rows.itemsize < 4 and not self._rounds:
                self._masters[name] = master = rows.detach().float().requires_grad_()
                if self._lives_on_host("master", master):
                    to_host(master)
        groups = [
            {"params": [m for m in self._masters.values() if (m.ndim >= 2) == decays], "decays": decays}
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self._eight_bit = config.kind == "adamw_8bit"
        self._fused = not needs_torchao(config)
        self._adam: Any
        if self._fused:
            self._adam = torch.optim.AdamW(groups, fused=True)
        else:
            from torchao.optim.adam import AdamW8bit, _AdamW

            kind = AdamW8bit if self._eight_bit else _AdamW
            self._adam = kind(groups, bf16_stochastic_round=self._rounds)
        self.configure(config, total_steps=total_steps)

    def configure(self, config: OptimizerConfig, *, total_steps: int) -> None:
        """Change constants and schedule; steps and moments stay."""
        self._config = config
        self._total_steps = total_steps
        for group in self._adam.param_groups:
            decay = config.weight_decay if group["decays"] else 0.0
            group |= {"betas": config.betas, "eps": config.eps, "weight_decay": decay}

    def reset_state(self) -> None:
        """Drop the moments and restart the schedule; the weights stay, in full precision."""
        self._steps, self._factor = 0, 1.0
        self._adam.state.clear()

    @property
    def learning_rate(self) -> float:
        """The rate of the next training step: linear warm-up, then the schedule, times `band`'s factor."""
        config, step = self._config, self._steps
        peak = config.learning_rate * self._factor
        if step < config.warmup_steps:
            return peak * (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, self._total_steps - config.warmup_steps))
        floor = 1.0 if config.schedule == "constant" else config.min_learning_rate_ratio
        left = 1.0 - progress
        if config.schedule == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        return peak * (floor + (1.0 - floor) * left)

    def step(self) -> float:
        """Clip gradients, update, and clear gradients. Returns the gradient's norm before clipping.

        Raises:
            RuntimeError: no parameter has a gradient.
            Diverged: the gradient is not finite; the weights are unchanged.
            torch.OutOfMemoryError: if Adam's moments do not fit, weights and gradients are unchanged.
        """
        gradients = self._gradients.summed()
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
        limit = self._config.max_grad_norm
        scale = None if limit is None or grad_norm <= limit else (norm + 1e-6) / limit
        if self._fused:  # its kernel divides the gradient by this, as for a GradScaler
            self._adam.grad_scale = scale
        elif scale is not None:
            torch._foreach_div_([*gradients.values()], scale)
        for group in self._adam.param_groups:
            if self._fused:
                group["lr"] = self.learning_rate
            else:
                group["lr"].fill_(self.learning_rate)
        self.zero_grad()
        self.mid_step = True
        for names in self._visited(gradients):
            for name in names:
                self._masters[name].grad = gradients[name].to(self._masters[name].dtype)
            self._adam.step()
            for name in names:
                self._masters[name].grad = None
            self._write_back(names)
        self._exchange_rows(gradients)
        return grad_norm

    def _exchange_rows(self, names: Collection[str]) -> None:
        """All-gather the updated rows of whole parameters, in the model's order."""
        whole = self._gradients.whole_parameters()
        all_gather([tensor for name, tensor in whole.items() if name in names], self._world)

    def _make_moments(self, names: Iterable[str]) -> None:
        """Allocate all missing states of Adam, before any weight changes: the memory may run out."""
        states = {}
        for name in names:
            master = self._masters[name]
            if self._adam.state.get(master):
                continue
            step = torch.zeros((), device=self._device if self._fused else "cpu")
            states[master] = {"step": step} | {kind: self._moment(master, kind) for kind in MOMENTS}
        self._adam.state.update(states)

    def _moment(self, master: Tensor, kind: str) -> Tensor:
        size = master.numel()
        if self._eight_bit and size >= LEAST_8BIT and size % BLOCK_8BIT == 0:
            from torchao.optim.subclass_8bit import OptimState8bit

            moment: Any = OptimState8bit.zeros(master.shape, kind == "exp_avg", BLOCK_8BIT, self._device)
            if kind == "exp_avg":
                # torchao's table ends at 1 and -0.993. With -1 it holds the largest magnitude of any block,
                # so that quantizing the saved values again gives the same moment.
                moment.qmap[0] = -1.0
        else:
            dtype = torch.promote_types(master.dtype, torch.float32)
            moment = torch.zeros_like(master, dtype=dtype, device=self._device, requires_grad=False)
        if self._lives_on_host("optimizer", master):
            for part in _parts(moment).values():
                to_host(part)
        return moment

    def _visited(self, names: Iterable[str]) -> Iterator[Sequence[str]]:
        """Yield names whose masters and moments are on the device, and then one by one those on the host."""
        away = {name: tensors for name in names if (tensors := self._movable(name, self._on_host))}
        if stay := [name for name in names if name not in away]:
            # torchao copies gradients in the parameter's dtype, so only one at a time.
            yield from [stay] if self._fused else [[name] for name in stay]
        for name, tensors in away.items():
            with on_device(tensors, self._device):
                yield [name]
        if away and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _movable(self, name: str, states: Collection[State]) -> list[Tensor]:
        """Return the tensors of these states that are worth moving to host memory and back."""
        if self._masters[name].nbytes < SMALLEST:
            return []
        tensors = [*self._moments_of(name).values()] if "optimizer" in states else []
        if "master" in states and name in self._gradients.buffers and not self._rounds:
            tensors.append(self._masters[name])
        return [tensor for tensor in tensors if tensor.ndim]  # without torch's step

    def _moments_of(self, name: str) -> dict[str, Tensor]:
        """Return Adam's plain tensors; an 8-bit moment has codes, scales and a table."""
        state = self._adam.state.get(self._masters[name], {})
        return {kind + part: t for kind, moment in state.items() for part, t in _parts(moment).items()}

    def _lives_on_host(self, state: State, like: Tensor) -> bool:
        return state in self._on_host and like.nbytes >= SMALLEST

    def keep_on_host(self, state: State) -> None:
        """Move the moments or the masters to host memory, from where `step` copies them one by one."""
        if state in self._on_host:
            return
        self._on_host.add(state)
        for name in self._masters:
            for tensor in self._movable(name, [state]):
                to_host(tensor)

    def advance(self) -> None:
        """End a training step of one or several optimizer steps: advance the schedule."""
        self._steps += 1
        self.mid_step = False

    def follow(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the factor of `band` by a step's metrics, and return the metric of the factor before.

        Raises ValueError if the first step that trained lacks the metric. A later one keeps the factor.
        """
        band = self._config.band
        if band is None:
            return {}
        used, measured = self._factor, metrics.get(band.metric, math.nan)
        if math.isfinite(measured):
            self._factor = band.moved(used, measured, band.min, band.max)
        elif self._steps <= 1 and not metrics.get("update/skipped"):
            known = choices(band.metric, metrics)
            raise ValueError(f"optimizer.band.metric = {band.metric!r} is no number of this step: {known}")
        return {"learning_rate/factor": used}

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor to which a backward may add the parameter's gradient, as `Gradients.of`."""
        return self._gradients.of(parameter)

    def zero_grad(self) -> None:
        self._gradients.clear()

    def state(self) -> dict[str, Any]:
        """Return the part of the state that fits into JSON."""
        return {"steps": self._steps, "factor": self._factor}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._steps, self._factor = int(state["steps"]), float(state.get("factor", 1.0))

    def state_tensors(self) -> dict[str, Tensor]:
        """Return masters and moments by `KIND.PARAMETER`: with `state`, all that a resumed run needs.

        The tensors are live, or float32 copies on the host of those in fewer bits. With several ranks they
        are DTensors of all rows.
        """
        tensors = {}
        for name, master in self._masters.items():
            state = {"master": master.detach()} | self._adam.state.get(master, {})
            for kind, rows in state.items():
                if hasattr(rows, "codes"):
                    rows = rows.dequantize().cpu()
                elif rows.itemsize < 4:
                    rows = rows.to("cpu", torch.float32)
                shape = self._parameters[name].shape
                tensors[f"{kind}.{name}"] = as_sharded(rows, shape, self._world) if rows.ndim else rows
        return tensors

    def moments(self) -> dict[str, Tensor]:
        """Return Adam's live state of this rank's rows by `KIND.PARAMETER`; empty before the first step."""
        return {f"{kind}.{n}": t for n in self._masters for kind, t in self._moments_of(n).items()}

    def masters(self) -> dict[str, Tensor]:
        """Return the live float32 masters of 16-bit parameters by name."""
        return {} if self._rounds else {name: self._masters[name] for name in self._gradients.buffers}

    def gradient_buffers(self) -> dict[str, Tensor]:
        """Return the float32 buffers of gradients, whose content is unused between steps."""
        return dict(self._gradients.buffers)

    @torch.no_grad()
    def load_state_tensors(
        self, saved: Mapping[str, Tensor], read: Callable[[Mapping[str, Tensor]], object]
    ) -> None:
        """Restore `state_tensors` by `read`, which fills tensors of these names, and the trained weights.

        `saved` has the saved shapes. ValueError for a tensor that is missing, unknown or of another shape.
        """
        self._adam.state.clear()
        self._make_moments([name for name in self._masters if f"exp_avg.{name}" in saved])
        tensors = self.state_tensors()
        require_same_shapes("the optimizer's tensors", saved, tensors)
        read(tensors)
        for name, master in self._masters.items():
            for kind, moment in self._adam.state.get(master, {}).items():
                if hasattr(moment, "codes"):
                    moment.copy_(local(tensors[f"{kind}.{name}"]).to(moment.codes.device))
        for name in self._gradients.buffers:
            rows_of(self._parameters[name], self._world).copy_(local(tensors[MASTER + name]))
        self._exchange_rows(self._masters)

    @torch.no_grad()
    def _write_back(self, names: Iterable[str]) -> None:
        if copied := [] if self._rounds else [name for name in names if name in self._gradients.buffers]:
            rows = [rows_of(self._parameters[name], self._world) for name in copied]
            torch._foreach_copy_(rows, [self._masters[name] for name in copied])


def needs_torchao(config: OptimizerConfig) -> bool:
    """Return whether torchao implements the optimizer; raise ImportError if it is not installed."""
    keys = {
        "optimizer.kind = 'adamw_8bit'": config.kind == "adamw_8bit",
        "optimizer.stochastic_rounding = true": config.stochastic_rounding,
    }
    for key, needed in keys.items():
        if needed and find_spec("torchao") is None:
            raise ImportError(f"{key}, which needs torchao: pip install 'grpo-fast[torchao]'")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about kernels for other GPUs
    return any(keys.values())


def _parts(moment: Any) -> dict[str, Tensor]:
    """Return a moment's plain tensors by suffix: one, or several of an 8-bit moment."""
    if not hasattr(moment, "codes"):
        return {"": moment}
    return {".codes": moment.codes, ".scale": moment.scale, ".qmap": moment.qmap}


def require_same_shapes(what: str, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError if `saved` does not have the names and shapes of the model's tensors."""
    shapes, expected = ({name: t.shape for name, t in tensors.items()} for tensors in (saved, wanted))
    if wrong := sorted(name for name in {*saved, *wanted} if shapes.get(name) != expected.get(name)):
        raise ValueError(
            f"{what} do not belong to this model: {wrong[0]!r} and {len(wrong) - 1} more are missing, "
            "unknown or of another shape; load them with the configuration they were saved with"
        )
