"""What an update holds at every moment, traced on the meta device, as lines in the sizes of its batch.

Our own forward, the head and a backward run on tensors without memory, so no architecture needs formulas of
its own. A dispatch mode notes every storage that appears and goes. Its bytes tell what they are in proportion
to: see `UNITS`. What is alive with any other batch is one product with a matrix.

tests/plan/test_prediction.py holds it against the allocator. torch's own MemTracker under fake tensors does
not look into operators, which leaves it far too low without checkpointing; it fails on LoRA, and runs anew
for every size.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fast.plan.model_shape import ModelShape, model_shape, skeleton
from grpo_fast.plan.stand_ins import UNITS, Allocation, allocate, fuse, planned_logprobs, register, tiled
from grpo_fast.policy import PackedBatch, Policy
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.quantization import quantizes

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

TOKENS, TARGETS = UNITS["tokens"], UNITS["targets"]
LARGEST_CONSTANT = 2**38  # bytes


class Event(NamedTuple):
    """Storage that appears (sign 1) or goes (sign -1)."""

    sign: int
    bytes: int
    is_sum: bool = False  # of two tensors of one size


class Recorder(TorchDispatchMode):
    """Notes every storage that operators make, from the first tensor on it to the last.

    Args:
        model: its own tensors do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.in_backward = False
        self._alive: dict[int, object] = {
            tensor.untyped_storage()._cdata: tensor for tensor in (*model.parameters(), *model.buffers())
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = allocate(_inside(func, args))
        for tensor in inside:
            self._note(tensor, is_sum=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, is_sum=func is torch.ops.aten.add.Tensor)
        return result

    def _note(self, tensor: Tensor, *, is_sum: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            last = self.events[-1]
            # Autograd adds a gradient into the one that it holds already, unless a dispatch mode is active:
            # then it makes a new tensor, and lets go of the old one at once.
            if self.in_backward and last.is_sum and size == last.bytes:
                self.events.pop()
            else:
                self.events.append(Event(-1, size))

        self.events.append(Event(1, size, is_sum))
        self._alive[key] = weakref.ref(storage, gone)


def _inside(func: Any, args: Any) -> list[Allocation]:
    """What an operator makes and frees unseen: of many tokens with a weight in 4 bits, all its numbers."""
    if func.name() != "bitsandbytes::gemm_4bit":
        return []
    tokens, _, shape, _, block, *_ = args
    return [((-(-math.prod(shape) // block),), torch.float32), (tuple(shape), tokens.dtype)]


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


@dataclass(frozen=True)
class Timeline:
    """What is alive after each of E events."""

    lines: np.ndarray  # (E, 1 + units): constant bytes, and bytes in proportion to each of UNITS
    forward_end: int  # the event with which the backward begins

    def live(self, sizes: Mapping[str, float]) -> np.ndarray:
        """(E,) bytes alive in a batch that has so many of UNITS; 0 of those left out."""
        return self.lines @ [1, *(sizes.get(unit, 0) for unit in UNITS)]

    @classmethod
    def of(cls, events: Sequence[Event], forward_end: int) -> Timeline:
        """
        Raises:
            RuntimeError: bytes that are neither constant nor in proportion to a unit.
        """
        changes, primes = np.zeros((len(events), 1 + len(UNITS))), [*UNITS.values()]
        for change, (sign, size, _) in zip(changes, events, strict=True):
            unit = next((i for i, prime in enumerate(primes) if size % prime == 0), None)
            if unit is not None:
                change[1 + unit] = sign * size / primes[unit]
            elif size < LARGEST_CONSTANT:
                change[0] = sign * size
            else:
                raise RuntimeError("this model allocates what grows otherwise than with its tokens")
        return cls(changes.cumsum(axis=0), forward_end)


def textless_policy(model: PreTrainedModel | PeftModel, attention: str) -> Policy:
    """A policy that sees tokens alone."""
    return Policy(model, cast("PreTrainedTokenizerBase", None), attention=attention)


class Traces:
    """Shapes and timelines of one architecture, trained in one or several ways: each takes seconds, once."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self._made: dict[object, Any] = {}

    def shape(self, model: ModelConfig) -> ModelShape:
        """
        Raises:
            ValueError, ImportError: as `skeleton`.
        """
        model = model.model_copy(update={"gradient_checkpointing": False})  # which changes no counts
        return self._once(_way(model), lambda: model_shape(skeleton(self.config, model)))

    def forward(self, model: ModelConfig) -> Timeline:
        """Without gradients, of the model as an engine runs it: with adapters on a base in 4 bits alone."""
        keys = {"dtype"} | ({"quantization", "lora"} if quantizes(model, self.config) else set())
        bare = ModelConfig(path=model.path, **model.model_dump(include=keys), gradient_checkpointing=False)
        return self._once(("forward", _way(bare)), lambda: _trace_forward(skeleton(self.config, bare)))

    def update(
        self, model: ModelConfig, attention: str, *, first: bool, fused: bool = False, in_tiles: bool = False
    ) -> Timeline:
        """Forward, loss and backward of one micro-batch, besides the model, its masters and their buffers.

        Args:
            attention: as `resolve_attention` gives it.
            first: gradients of float32 parameters are allocated during this backward, and stay. In later
                micro-batches, and for 16-bit parameters always, they are added to existing buffers.
            fused: Liger's kernels or torch.compile compute the layers.
            in_tiles: the batch has more tokens than a tile of an MLP that is recomputed.
        """
        how = attention, first and self.shape(model).wide > 0, fused, in_tiles
        return self._once((_way(model), *how), lambda: _trace_update(skeleton(self.config, model), *how))

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _way(model: ModelConfig) -> str:
    """The keys of a `model` section that its bytes depend on."""
    return model.model_dump_json(
        include={"dtype", "quantization", "lora", "train_lm_head", "gradient_checkpointing"}
    )


def _trace_forward(model: PreTrainedModel | PeftModel) -> Timeline:
    policy, batch = textless_policy(model, "sdpa"), _batch()
    register()
    with torch.no_grad(), recording(model) as recorder:
        policy.hidden_states(batch)
        return Timeline.of(recorder.events, len(recorder.events))


def _trace_update(
    model: PreTrainedModel | PeftModel, attention: str, first: bool, fused: bool, in_tiles: bool
) -> Timeline:
    """Of a model that is of no use afterwards."""
    policy, batch = textless_policy(model, "sdpa"), _batch()  # the name keeps transformers from making a mask
    register(attention)
    if fused:
        fuse(model)
    for parameter in policy.trainable().values():
        if not first or parameter.element_size() < 4:
            parameter.register_post_accumulate_grad_hook(_drop)  # as `PolicyOptimizer` does
    with tiled() if in_tiles else nullcontext(), recording(model) as recorder:
        head, weight = policy.head, policy.head.weight
        hidden = policy.hidden_states(batch)
        # The head adds its gradient to the weight's by itself: see `PolicyOptimizer.gradient_of`.
        logprobs = planned_logprobs(hidden, weight.detach(), head.bias)
        loss = logprobs.sum()
        del hidden, logprobs
        forward_end, recorder.in_backward = len(recorder.events), True
        if first and weight.requires_grad and weight.element_size() == 4:
            weight.grad = torch.zeros_like(weight)
        loss.backward()
        del loss
        return Timeline.of(recorder.events, forward_end)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _batch() -> PackedBatch:
    """One document without memory."""

    def empty(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    return PackedBatch(
        input_ids=empty(TOKENS),
        position_ids=empty(TOKENS),
        segment_ids=empty(TOKENS),
        cu_seqlens=empty(2, torch.int32),
        loss_index=empty(TARGETS),
        targets=empty(TARGETS),
        sequence_ids=empty(TARGETS),
        group_ids=empty(TARGETS),
        num_sequences=1,
        rows=empty(1),
        token_index=empty(TARGETS),
        columns={name: empty(TARGETS, torch.float32) for name in ("advantages", "sampler_logprobs")},
    )
