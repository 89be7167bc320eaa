"""Bytes by part, for the update and for the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_fast.plan.devices import CUDA_CONTEXT, GIB, DeviceBudget
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS, ModelShape
from grpo_fast.plan.setup import MicroBatch, Setup, StepSizes, largest_micro_batch
from grpo_fast.plan.stand_ins import Column
from grpo_fast.plan.trace import Timeline, Traces
from grpo_fast.rollout.config import Part
from grpo_fast.rollout.handover import PARTS
from grpo_fast.rollout.sampling import SLICE, SLICE_ELSEWHERE
from grpo_fast.rollout.transformers import CPU_BATCH_TOKENS

Phase = Literal["update", "rollout"]
PHASES: tuple[Phase, ...] = ("update", "rollout")

CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}
"""torch's default by major compute capability, and elsewhere:"""
_SMALL_CUBLAS_WORKSPACE = 8 << 20

FRAGMENTATION = 0.05
"""What the allocator may waste, as a share of the transient bytes."""

SOFTCAP_BYTES_PER_SCORE = 18
"""Transient bytes of each attention score of one document on a CPU with a softcap (measured; Gemma 2 within
7 %)."""

ENGINE_RESIDUE = int(0.4 * GIB)
"""Of vLLM, awake or asleep: graphs, handles. Seen on an H200 with vLLM 0.26 and Qwen2.5-1.5B's shape."""

_LARGE_GPU = 70 * GIB  # from here on vLLM takes the larger of its two defaults
_BATCHED_TOKENS = (8192, 16384)  # tokens of one forward of vLLM
_SEQUENCES = (256, 1024)
_SAMPLER_COPIES = 3  # of float32 logits in vLLM's sampler: logits, probabilities, sorted or masked ones
_DRAW_COPIES = 4  # of a slice of float32 logits in ours

_TRANSIENT = ("activations", "gradients in flight", "head", "masks", "packed batches", "engine workspace")
_OUTSIDE_THE_ALLOCATOR = ("CUDA context", "engine residue", "fragmentation")


@dataclass(frozen=True)
class Calibration:
    """What a short run on the device itself says about the prediction; the default takes it as it is."""

    transient: float = 1.0  # measured / predicted, of the transient bytes
    context: int | None = None  # bytes taken beside torch's allocator; None: `CUDA_CONTEXT` on a GPU


@dataclass(frozen=True)
class Prediction:
    """Bytes by part for each phase, at its highest."""

    device: DeviceBudget
    parts: dict[Phase, dict[str, int]]
    offloaded: tuple[Part, ...]  # of the trainer, during the rollout
    micro_batch: MicroBatch

    def total(self, phase: Phase) -> int:
        """Bytes of the device taken in this phase."""
        return sum(self.parts[phase].values())

    def allocated(self, phase: Phase) -> int:
        """Of these, what torch's allocator holds: what `torch.cuda.max_memory_allocated` shows."""
        return sum(size for part, size in self.parts[phase].items() if part not in _OUTSIDE_THE_ALLOCATOR)

    def transient(self, phase: Phase) -> int:
        """Of the allocated bytes, those that are freed again within the phase."""
        return _transient(self.parts[phase])

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def free(self) -> int:
        """What is left of the device at the higher of the two peaks; negative where it does not fit."""
        return self.device.total - max(map(self.total, PHASES))


class Predictor:
    """Predictions of one setup at any sizes.

    Args:
        traces: of the same architecture; making them takes seconds, so setups of one model share them.
    """

    def __init__(
        self, setup: Setup, *, traces: Traces | None = None, calibration: Calibration | None = None
    ) -> None:
        """
        Raises:
            ValueError: a model that packing does not know, or LoRA modules that it does not have.
        """
        self.setup = setup
        self.traces = traces or Traces(setup.config)
        self.calibration = calibration or Calibration()
        self.shape = self.traces.shape(setup.model)

    def predict(self, sizes: StepSizes, micro_batch: MicroBatch | None = None) -> Prediction:
        """Bytes at these sizes, or with a micro-batch other than their largest."""
        setup = self.setup
        batch = micro_batch or largest_micro_batch(sizes, share_prompts=setup.shares_prompts)
        resident = self._resident(batch)
        update = resident | self._micro_batch(batch) | {"packed batches": sizes.packed_bytes}
        engine = self._engine(sizes)
        if setup.engine == "vllm":
            asleep = ("engine residue",) if setup.sleeps else ("engine weights", "KV cache", "engine residue")
            update |= {part: engine[part] for part in asleep}
        # Buffers of 16-bit parameters' gradients outlive the step.
        rollout = resident | {"gradients": resident["master"]} | engine
        offloaded = self._offloaded(rollout)
        parts: dict[Phase, dict[str, int]] = {
            "update": self._with_overheads(update),
            "rollout": self._with_overheads(rollout | dict.fromkeys(offloaded, 0)),
        }
        return Prediction(setup.device, parts, offloaded, batch)

    def _resident(self, batch: MicroBatch) -> dict[str, int]:
        """The trainer's tensors that outlive a micro-batch."""
        shape, setup = self.shape, self.setup
        narrow, wide = shape.narrow, shape.wide
        steps = shape.trainable_tensors * (512 if setup.device.kind == "cuda" else 4)
        return {
            "weights": shape.bytes,
            "master": 4 * narrow,
            "gradients": 4 * narrow + (0 if batch.count == 1 else 4 * wide),
            "optimizer": 8 * (narrow + wide) + steps,
            "reference": shape.bytes if setup.needs_reference else 0,
        }

    def _micro_batch(self, batch: MicroBatch) -> dict[str, int]:
        """Transient bytes of a micro-batch, at the moment when their sum is largest."""
        setup, shape = self.setup, self.shape
        timeline = self.traces.update(
            setup.model, setup.attention, masked=setup.shares_prompts, first=batch.count == 1
        )
        head = head_bytes(
            setup.device.head_device,
            rows=batch.targets,
            hidden=shape.hidden,
            vocabulary=shape.vocabulary,
            dtype=setup.dtype,
            weight_trained=shape.head_trained,
            softcap=shape.softcap,
            entropy_trained=setup.entropy_trained,
            weight_grad=shape.head_trained,
        )
        in_16_bits = shape.itemsize if shape.itemsize < 4 else 0
        masks: dict[Column, int] = {
            "mask": shape.itemsize * batch.squares,
            "scores": shape.heads * batch.squares * (2 * 4 + in_16_bits),
            "scores_transient": shape.heads * batch.longest**2 * SOFTCAP_BYTES_PER_SCORE,
        }
        heads: dict[Column, int] = {
            "head_kept": head.kept,
            "head_forward": head.forward,
            "head_backward": head.backward,
        }
        plain = timeline.live(batch.inputs, batch.targets, {})
        peak = int(timeline.live(batch.inputs, batch.targets, masks | heads).argmax())
        activations = min(plain[timeline.forward_end - 1], plain[peak])

        def at_peak(columns: dict[Column, int]) -> float:
            return sum(timeline.columns[name][peak] * size for name, size in columns.items())

        found = {
            "activations": activations,
            "gradients in flight": plain[peak] - activations,
            "head": at_peak(heads),
            "masks": at_peak(masks),
        }
        return {part: int(size * self.calibration.transient) for part, size in found.items()}

    def _engine(self, sizes: StepSizes) -> dict[str, int]:
        forward = self.traces.forward(self.setup.model)
        if self.setup.engine == "vllm":
            return vllm_bytes(self.setup, self.shape, sizes, forward)
        return transformers_bytes(self.setup, self.shape, sizes, forward)

    def _offloaded(self, rollout: dict[str, int]) -> tuple[Part, ...]:
        """Parts of the trainer offloaded while the engine generates; with `auto`, until it has room."""
        setup = self.setup
        if setup.offload != "auto":
            return tuple(part for part in setup.offload if rollout[part])
        if setup.engine != "vllm" or setup.device.kind != "cuda":
            return ()
        missing = sum(self._with_overheads(rollout).values()) - setup.device.total
        leaving: list[Part] = []
        for part in PARTS:
            if missing > 0 and rollout[part]:
                leaving.append(part)
                missing -= rollout[part]
        return tuple(leaving)

    def _with_overheads(self, parts: dict[str, int]) -> dict[str, int]:
        """A phase's parts with what lies outside torch's allocator; parts of no bytes are left out."""
        device = self.setup.device
        if device.kind == "cuda":
            context = CUDA_CONTEXT if self.calibration.context is None else self.calibration.context
            workspace = CUBLAS_WORKSPACE.get(device.capability[0], _SMALL_CUBLAS_WORKSPACE)
            parts = parts | {"cuBLAS workspace": workspace, "CUDA context": context}
        parts = parts | {"fragmentation": int(FRAGMENTATION * _transient(parts))}
        return {part: size for part, size in parts.items() if size}


def _transient(parts: dict[str, int]) -> int:
    return sum(parts.get(part, 0) for part in _TRANSIENT)


def vllm_bytes(setup: Setup, shape: ModelShape, sizes: StepSizes, forward: Timeline) -> dict[str, int]:
    """vLLM awake, with every completion of a step in flight."""
    large = setup.device.total >= _LARGE_GPU
    sequences = min(setup.max_sequences or _SEQUENCES[large], sizes.completions)
    prefill = forward.live(min(_BATCHED_TOKENS[large], sizes.prompts * sizes.prompt_length), 0, {}).max()
    base = shape.bytes - 4 * shape.parameters.get("adapters", 0)
    return {
        "engine weights": 0 if setup.shares_weights else base,
        "KV cache": setup.kv_cache_bytes or paged_kv_bytes(shape, sizes),
        "engine workspace": int(prefill) + 4 * _SAMPLER_COPIES * sequences * shape.vocabulary,
        "engine residue": ENGINE_RESIDUE,
    }


def paged_kv_bytes(shape: ModelShape, sizes: StepSizes) -> int:
    """Pages for every completion of a step at its longest: none is preempted. Full pages of a prompt are
    shared by its group."""
    shared = sizes.prompt_length // BLOCK_TOKENS
    own = -(-sizes.sequence_length // BLOCK_TOKENS) - shared
    pages = sizes.prompts * (shared + sizes.generations * own) + 1  # vLLM's null page
    return pages * BLOCK_TOKENS * shape.paged_kv_bytes_per_token


def transformers_bytes(
    setup: Setup, shape: ModelShape, sizes: StepSizes, forward: Timeline
) -> dict[str, int]:
    """Our own engine at the end of its longest batch, when the cache is full."""
    prompts, rows = in_flight(setup, shape, sizes)
    prefill = forward.live(prompts * sizes.prompt_length, prompts, {}).max()
    prefill += shape.itemsize * prompts * shape.vocabulary
    scores = 4 * rows * shape.heads * (sizes.prompt_length + 2 * sizes.completion_length)
    drawn = min(rows * shape.vocabulary, SLICE.get(setup.device.kind, SLICE_ELSEWHERE))
    decode = rows * shape.vocabulary * shape.itemsize + 4 * _DRAW_COPIES * drawn + scores
    return {
        "KV cache": transformers_kv_bytes(setup, shape, sizes, prompts, rows),
        "engine workspace": max(int(prefill), decode),
    }


def transformers_kv_bytes(setup: Setup, shape: ModelShape, sizes: StepSizes, prompts: int, rows: int) -> int:
    """Of `rows` completions of `prompts` prompts, buffers that grow by copying included."""
    if not _shares_prefix(shape, setup):
        return rows * shape.kv_bytes(sizes.sequence_length)
    itemsize = 4 if setup.device.kind == "cpu" else shape.itemsize  # CPUs decode in float32
    numbers = [layer.numbers for layer in shape.layers]
    growing = rows * max(numbers) * sizes.completion_length // 2
    tokens = prompts * sizes.prompt_length + rows * sizes.completion_length
    return itemsize * (tokens * sum(numbers) + growing)


def in_flight(setup: Setup, shape: ModelShape, sizes: StepSizes) -> tuple[int, int]:
    """(prompts, completions) that the transformers engine decodes at once."""

    def held(rows: int) -> int:
        if not _shares_prefix(shape, setup):
            return rows * sizes.sequence_length
        prompts = -(-rows // sizes.generations)
        return prompts * sizes.prompt_length + rows * sizes.completion_length

    budget = setup.max_batch_tokens
    if budget is None and setup.device.kind == "cpu":
        budget = max(CPU_BATCH_TOKENS, held(1))
    rows = sizes.completions
    if budget is not None and held(rows) > budget:
        rows = max((r for r in range(1, rows) if held(r) <= budget), default=1)
    return -(-rows // sizes.generations), rows


def _shares_prefix(shape: ModelShape, setup: Setup) -> bool:
    """As `SharedPrefixDecoder.supports`: plain full attention in every layer."""
    capped = getattr(setup.config.get_text_config(), "attn_logit_softcapping", None)
    return all(layer.window is None for layer in shape.layers) and not capped
