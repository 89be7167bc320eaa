"""Bytes by part, for the update and for the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_fast.plan.devices import CUDA_CONTEXT, DeviceBudget
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.micro_batch import MicroBatch, largest_micro_batch, step_bytes
from grpo_fast.plan.rollout import transformers_bytes, vllm_bytes
from grpo_fast.plan.setup import Setup, Workload
from grpo_fast.plan.traces import Traces
from grpo_fast.rollout.handover import PARTS, Part

Phase = Literal["update", "rollout"]

CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}
"""torch's default by major compute capability, and elsewhere:"""
_SMALL_CUBLAS_WORKSPACE = 8 << 20

FRAGMENTATION = 0.05
"""What the allocator may waste, as a share of what comes and goes."""

SCORES_PASSING = 18
"""Of a score of one document while a CPU attends with a softcap; measured, fits Gemma 2's layers to 7 %."""

_PASSING = ("activations", "gradients on their way", "head", "masks", "packed batches", "engine workspace")
# What torch's allocator does not count.
_OUTSIDE = ("CUDA context", "engine residue", "fragmentation")


@dataclass(frozen=True)
class Calibration:
    """What a short run on the device itself says about the prediction; the default takes it as it is."""

    passing: float = 1.0  # measured / predicted, of what comes and goes
    context: int | None = None  # bytes taken beside torch's allocator; none: `CUDA_CONTEXT` on a GPU


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
        return sum(size for part, size in self.parts[phase].items() if part not in _OUTSIDE)

    def passing(self, phase: Phase) -> int:
        """Of the allocated bytes, those that come and go."""
        return sum(size for part, size in self.parts[phase].items() if part in _PASSING)

    @property
    def peak(self) -> int:
        """The higher of the two phases."""
        return max(map(self.total, self.parts))

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.total

    @property
    def free(self) -> int:
        """What is left of the device at the peak; negative where it does not fit."""
        return self.device.total - self.peak


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
        self._model = self.traces.of(setup.model)
        self.shape = self._model.shape

    def predict(self, work: Workload, micro_batch: MicroBatch | None = None) -> Prediction:
        """Bytes at these sizes, or with a micro-batch other than the largest of `work`."""
        setup = self.setup
        batch = micro_batch or largest_micro_batch(work, share_prompts=setup.shares_prompts)
        update = self._trainer(batch) | self._passing(batch) | {"packed batches": step_bytes(work)}
        engine = self._engine(work)
        if setup.engine == "vllm":
            asleep = ("engine residue",) if setup.sleeps else ("engine weights", "KV cache", "engine residue")
            update |= {part: engine[part] for part in asleep}
        stays, offloaded = self._rollout_residents(batch, engine)
        parts: dict[Phase, dict[str, int]] = {"update": update, "rollout": stays | engine}
        return Prediction(
            setup.device,
            {phase: self._with_overheads(found) for phase, found in parts.items()},
            offloaded,
            batch,
        )

    def _trainer(self, batch: MicroBatch) -> dict[str, int]:
        """What of the trainer is there all the time."""
        shape, setup = self.shape, self.setup
        narrow, wide = shape.narrow, shape.wide
        steps = shape.trainable_tensors * (512 if setup.device.kind == "cuda" else 4)
        gathered = 4 * narrow + (0 if batch.count == 1 else 4 * wide)
        return {
            "weights": shape.bytes,
            "master": 4 * narrow,
            "gradients": gathered,
            "optimizer": 8 * (narrow + wide) + steps,
            "reference": shape.bytes if setup.needs_reference else 0,
        }

    def _passing(self, batch: MicroBatch) -> dict[str, int]:
        """What comes and goes with a micro-batch, at the moment when all of it together is largest."""
        setup, shape = self.setup, self.shape
        timeline = self._model.update(setup.attention, masked=setup.shares_prompts, first=batch.count == 1)
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
        masks = {"mask": shape.itemsize * batch.squares}
        pairs = shape.heads * batch.squares
        masks["scores"] = pairs * (2 * 4 + (shape.itemsize if shape.itemsize < 4 else 0))
        masks["scores_passing"] = shape.heads * batch.longest**2 * SCORES_PASSING
        heads = {"head_kept": head.kept, "head_forward": head.forward, "head_backward": head.backward}
        alive = timeline.live(batch.inputs, batch.targets, masks | heads)
        peak = int(alive.argmax())

        def at_peak(columns: dict[str, int]) -> int:
            return int(sum(timeline.symbols[name][peak] * size for name, size in columns.items()))

        plain = timeline.live(batch.inputs, batch.targets, {})
        activations = int(min(plain[timeline.forward_end - 1], plain[peak]))
        found = {
            "activations": activations,
            "gradients on their way": int(plain[peak]) - activations,
            "head": at_peak(heads),
            "masks": at_peak(masks),
        }
        return {part: int(size * self.calibration.passing) for part, size in found.items()}

    def _engine(self, work: Workload) -> dict[str, int]:
        setup = self.setup
        of_engine = vllm_bytes if setup.engine == "vllm" else transformers_bytes
        return of_engine(setup, self.shape, work, self._model.forward)

    def _rollout_residents(
        self, batch: MicroBatch, engine: dict[str, int]
    ) -> tuple[dict[str, int], tuple[Part, ...]]:
        """What of the trainer stays while the engine generates, and what leaves."""
        stays = self._trainer(batch)
        stays["gradients"] = stays["master"]  # buffers of 16-bit parameters' gradients outlive the step
        leaving: tuple[Part, ...] = ()
        if self.setup.offload != "auto":
            leaving = tuple(part for part in self.setup.offload if stays[part])
        elif self.setup.engine == "vllm" and self.setup.device.kind == "cuda":
            missing = sum(self._with_overheads(stays | engine).values()) - self.setup.device.total
            for part in PARTS:
                if missing > 0 and stays[part]:
                    leaving = (*leaving, part)
                    missing -= stays[part]
        return stays | dict.fromkeys(leaving, 0), leaving

    def _with_overheads(self, parts: dict[str, int]) -> dict[str, int]:
        """A phase's parts with what lies outside torch's allocator; parts of no bytes are left out."""
        device = self.setup.device
        if device.kind == "cuda":
            context = CUDA_CONTEXT if self.calibration.context is None else self.calibration.context
            workspace = CUBLAS_WORKSPACE.get(device.capability[0], _SMALL_CUBLAS_WORKSPACE)
            parts = parts | {"cuBLAS workspace": workspace, "CUDA context": context}
        passing = sum(parts.get(part, 0) for part in _PASSING)
        parts = parts | {"fragmentation": int(FRAGMENTATION * passing)}
        return {part: size for part, size in parts.items() if size}


def predict(setup: Setup, work: Workload, *, calibration: Calibration | None = None) -> Prediction:
    """Bytes of a step by part and phase."""
    return Predictor(setup, calibration=calibration).predict(work)
