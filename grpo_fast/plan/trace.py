"""What an update holds at every moment, traced on the meta device, as lines in the sizes of its batch.

Our own forward, the head and a backward run on tensors without memory, so no architecture needs formulas of
its own. A dispatch mode notes every storage that appears and goes. The allocations are the same whatever the
sizes, and each grows linearly with the input tokens T and the targets N: runs at three sizes give its line,
and the bytes alive in any other batch are one product with a matrix.

tests/plan/test_prediction.py holds it against the allocator. torch's own MemTracker under fake tensors does
not look into operators, which leaves it far too low without checkpointing; it fails on LoRA, and runs anew
for every size.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fast.plan.model_shape import ModelShape, layers_alike, model_shape, skeleton, with_layers
from grpo_fast.plan.stand_ins import Column, Tracing, planned_logprobs, traced
from grpo_fast.policy import PackedBatch, Policy, Sample, pack
from grpo_fast.policy.config import ModelConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

SIZES = ((64, 32), (128, 32), (128, 96))  # (T, N) of the three runs
FEW_LAYERS = 3  # of which one is neither the first nor the last: the pattern of all between


@dataclass(frozen=True)
class Event:
    """Storage that appears (sign 1) or goes (sign -1)."""

    sign: int
    bytes: int
    column: Column | None = None  # it stands for that column instead of bytes
    is_sum: bool = False  # of two tensors of one size


@dataclass(frozen=True)
class Run:
    """The events of a forward and a backward at one size."""

    events: list[Event]
    forward_end: int  # how many of them the forward made


TraceAt = Callable[[int, int], Run]
"""(T, N) -> the run of a batch of these sizes."""


class Recorder(TorchDispatchMode):
    """Notes every storage that operators make, from the first tensor on it to the last.

    Args:
        model: its own tensors do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._column: Column | None = None
        self._alive: dict[int, object] = {
            tensor.untyped_storage()._cdata: tensor for tensor in (*model.parameters(), *model.buffers())
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), is_sum=func is torch.ops.aten.add.Tensor)
        return result

    def column(self, name: Column) -> Tensor:
        """A tensor that counts as the column's bytes for as long as it lives."""
        self._column = name
        tensor = torch.empty(0, device="meta")
        self._column = None
        return tensor

    def _note(self, storage: torch.UntypedStorage, *, is_sum: bool) -> None:
        key, size, column = storage._cdata, storage.nbytes(), self._column
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.events.append(Event(-1, size, column))

        self.events.append(Event(1, size, column, is_sum))
        self._alive[key] = weakref.ref(storage, gone)


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record what operators allocate in here, besides the model's own tensors."""
    enabled = gc.isenabled()
    gc.disable()  # what a collection frees, and when, would differ from run to run
    try:
        with Recorder(model) as recorder:
            yield recorder
    finally:
        if enabled:
            gc.enable()


def added_in_place(events: Sequence[Event]) -> list[Event]:
    """The events of a backward as they are without a recorder.

    Autograd adds a gradient into the one that it holds already, unless a dispatch mode is active: then it
    makes a new tensor, and lets go of the old one at once.
    """
    kept: list[Event] = []
    for event in events:
        last = kept[-1] if kept else None
        if last is not None and last.is_sum and (event.sign, event.bytes) == (-1, last.bytes):
            kept.pop()
        else:
            kept.append(event)
    return kept


class IrregularLayersError(Exception):
    """Layers that differ in what they allocate."""


def with_more_layers(short: TraceAt, long: TraceAt, times: int) -> TraceAt:
    """The trace of a model with `times` layers more than that of `short`, where `long` has one more.

    Raises:
        IrregularLayersError: on a call, where the layer more is no block of events that could be repeated.
    """

    def at(tokens: int, targets: int) -> Run:
        less, more = short(tokens, targets), long(tokens, targets)
        forward = _repeat_block(less.events[: less.forward_end], more.events[: more.forward_end], times)
        backward = _repeat_block(less.events[less.forward_end :], more.events[more.forward_end :], times)
        return Run(forward + backward, len(forward))

    return at


def _repeat_block(short: list[Event], long: list[Event], times: int) -> list[Event]:
    pairs = enumerate(zip(short, long, strict=False))
    start = next((i for i, (one, other) in pairs if one != other), len(short))
    block = long[start : start + len(long) - len(short)]
    if short[:start] + block + short[start:] != long:
        raise IrregularLayersError
    return short[:start] + block * times + short[start:]


@dataclass(frozen=True)
class Timeline:
    """Bytes alive after each of E events: `base` + `per_token`·T + `per_target`·N + the columns."""

    base: np.ndarray  # (E,)
    per_token: np.ndarray  # (E,)
    per_target: np.ndarray  # (E,)
    columns: Mapping[Column, np.ndarray]  # (E,) how many tensors of each are alive
    forward_end: int  # the event after which the backward begins

    def live(self, tokens: float, targets: float, columns: Mapping[Column, float]) -> np.ndarray:
        """(E,) bytes alive after each event, `columns` giving the bytes of one tensor of each."""
        alive = self.base + self.per_token * tokens + self.per_target * targets
        return alive + sum(self.columns[name] * size for name, size in columns.items())

    @classmethod
    def fit(cls, trace: TraceAt) -> Timeline:
        """
        Raises:
            RuntimeError: the events depend on the sizes by more than their bytes.
        """
        runs = [trace(*size) for size in SIZES]
        events = runs[0].events
        patterns = [[(event.sign, event.column) for event in run.events] for run in runs]
        if any(pattern != patterns[0] for pattern in patterns):
            raise RuntimeError("this model allocates differently for batches of different sizes")
        changes = np.array([[event.sign * event.bytes for event in run.events] for run in runs], dtype=float)
        system = np.array([(1, *size) for size in SIZES], dtype=float)
        base, per_token, per_target = np.cumsum(np.linalg.solve(system, changes), axis=1)
        columns: dict[Column, np.ndarray] = {
            name: np.cumsum([event.sign * (event.column == name) for event in events])
            for name in get_args(Column)
        }
        return cls(base, per_token, per_target, columns, runs[0].forward_end)


def trace_update(model: PreTrainedModel | PeftModel, attention: str, *, masked: bool, first: bool) -> TraceAt:
    """Forward, loss and backward of one micro-batch, besides the model, its masters and their buffers.

    Args:
        model: of `skeleton`.
        attention: as `resolve_attention` gives it.
        masked: whether completions share their prompts, so that documents are masked.
        first: gradients of float32 parameters are allocated during this backward, and stay. In later
            micro-batches, and for 16-bit parameters always, they are added to existing buffers.
    """
    policy = textless_policy(model, "sdpa")  # the name only keeps transformers from making a mask

    def at(tokens: int, targets: int) -> Run:
        batch = _batch(tokens, targets)
        with _gradients(model, first), recording(model) as recorder:
            with traced(Tracing(attention, masked, recorder.column)):
                head, weight = policy.head, policy.head.weight
                hidden = policy.hidden_states(batch)
                # The head adds its gradient to the weight's by itself: see `PolicyOptimizer.gradient_of`.
                logprobs = planned_logprobs(hidden, weight.detach(), head.bias)
                loss = logprobs.sum()
                del hidden, logprobs
                forward_end = len(recorder.events)
                if first and weight.requires_grad and weight.element_size() == 4:
                    weight.grad = torch.zeros_like(weight)
                loss.backward()
                del loss
            events = recorder.events
            return Run(events[:forward_end] + added_in_place(events[forward_end:]), forward_end)

    return at


def trace_forward(model: PreTrainedModel | PeftModel) -> TraceAt:
    """A forward without gradients, as for the prefill of prompts."""
    policy = textless_policy(model, "sdpa")

    def at(tokens: int, targets: int) -> Run:
        batch = _batch(tokens, targets)
        with torch.no_grad(), recording(model) as recorder:
            policy.hidden_states(batch)
            return Run(list(recorder.events), len(recorder.events))

    return at


def textless_policy(model: PreTrainedModel | PeftModel, attention: str) -> Policy:
    """A policy that sees tokens alone."""
    return Policy(model, cast("PreTrainedTokenizerBase", None), attention=attention)


def _batch(tokens: int, targets: int) -> PackedBatch:
    """One document without memory. Where it begins is known, and no operator's input."""
    prompt, zeros = tokens + 1 - targets, (0,) * tokens
    sample = Sample(zeros[:prompt], zeros[:targets], 0.0, 0, sampler_logprobs=(0.0,) * targets)
    (batch,) = pack([sample], max_tokens=tokens, share_prompts=False, device="cpu")
    return replace(batch.to("meta"), cu_seqlens=batch.cu_seqlens)


@contextmanager
def _gradients(model: nn.Module, first: bool) -> Iterator[None]:
    """Gradients leave the parameter as they do in `PolicyOptimizer`, and none stays behind."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    absorbed = [p for p in parameters if not first or p.element_size() < 4]
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in absorbed]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@dataclass
class Traces:
    """Shapes and timelines of one architecture, trained in one or several ways: each takes seconds, once."""

    config: PretrainedConfig
    _made: dict[object, Any] = field(default_factory=dict)

    def shape(self, model: ModelConfig) -> ModelShape:
        """
        Raises:
            ValueError: as `skeleton`.
        """
        return self._once(_way(model), lambda: model_shape(skeleton(self.config, model)))

    def forward(self, model: ModelConfig) -> Timeline:
        """Of the model without adapters and checkpointing, as an engine runs it."""
        bare = ModelConfig(path=model.path, dtype=model.dtype)
        return self._once(("forward", model.dtype), lambda: timeline(self.config, bare, trace_forward))

    def update(self, model: ModelConfig, attention: str, *, masked: bool, first: bool) -> Timeline:
        """See `trace_update`."""
        first = first and self.shape(model).wide > 0

        def trace(module: PreTrainedModel | PeftModel) -> TraceAt:
            return trace_update(module, attention, masked=masked, first=first)

        key = (_way(model), attention, masked, first)
        return self._once(key, lambda: timeline(self.config, model, trace))

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _way(model: ModelConfig) -> str:
    """The keys of a `model` section that its bytes depend on."""
    return model.model_dump_json(include={"dtype", "lora", "train_lm_head", "gradient_checkpointing"})


def timeline(
    config: PretrainedConfig, model: ModelConfig, trace_of: Callable[[PreTrainedModel | PeftModel], TraceAt]
) -> Timeline:
    """Of all layers; where they are alike, from traces of a few."""
    count = config.get_text_config().num_hidden_layers
    if count > FEW_LAYERS + 1 and layers_alike(config):
        short, long = (trace_of(skeleton(with_layers(config, FEW_LAYERS + more), model)) for more in (0, 1))
        try:
            return Timeline.fit(with_more_layers(short, long, count - FEW_LAYERS))
        except IrregularLayersError:
            pass  # layers differ in ways that the configuration does not list
    return Timeline.fit(trace_of(skeleton(config, model)))
