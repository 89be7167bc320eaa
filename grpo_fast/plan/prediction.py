"""Bytes by part, for the update and for the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.shards import BUCKET
from grpo_fast.head.plan import Workload
from grpo_fast.plan.devices import CUDA_CONTEXT, GIB, DeviceBudget, device_budget
from grpo_fast.plan.exchange import sync_seconds, update_exchange
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS
from grpo_fast.plan.seconds import SLEEP_SECONDS, rollout_seconds, transfer_seconds, update_seconds
from grpo_fast.plan.sizes import MicroBatch, StepSizes, largest, largest_micro_batch, whole_step
from grpo_fast.plan.trace import Traces
from grpo_fast.policy import recompute
from grpo_fast.policy.load import resolve_attention
from grpo_fast.policy.quantization import quantizes
from grpo_fast.rollout.config import Part
from grpo_fast.rollout.handover import MARGIN, PARTS
from grpo_fast.rollout.sampling import SLICE, SLICE_ELSEWHERE
from grpo_fast.rollout.transformers import CPU_BATCH_TOKENS

Phase = Literal["update", "rollout"]
PHASES: tuple[Phase, ...] = ("update", "rollout")

STAYS_SHARDED: Part = "reference"  # which mode shard keeps in rows, and never offloads

CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}
"""torch's default by major compute capability, and elsewhere:"""
_SMALL_CUBLAS_WORKSPACE = 8 << 20

FRAGMENTATION = 0.05
"""What the allocator may waste, as a share of the transient bytes."""

SOFTCAP_BYTES_PER_SCORE = 18
"""Transient bytes of each attention score of one sequence on a CPU with a softcap (measured; Gemma 2 within
7 %)."""

ENGINE_RESIDUE = int(0.4 * GIB)
"""Of vLLM, awake or asleep: graphs, handles. Seen on an H200 with vLLM 0.26 and Qwen2.5-1.5B's shape."""

_LARGE_GPU = 70 * GIB  # from here on vLLM takes the larger of its two defaults
_BATCHED_TOKENS = (8192, 16384)  # tokens of one forward of vLLM
_STATE: tuple[Part, ...] = ("optimizer", "master")  # which may be away from its step
_STEP_8BIT = 20  # transient bytes of a number whose 8-bit moments a CPU steps
_SAMPLER_COPIES = 3  # of float32 logits in vLLM's sampler: logits, probabilities, sorted or masked ones
_DRAW_COPIES = 4  # of a slice of float32 logits in ours

_TRANSIENT = (
    *("activations", "gradients in flight", "head", "masks", "packed batches", "engine workspace"),
    *("gathered", "exchange"),
)
_OUTSIDE_THE_ALLOCATOR = ("CUDA context", "engine residue", "fragmentation", "left free")


@dataclass(frozen=True)
class Calibration:
    """What a short run on the device itself says about the prediction; the default takes it as it is."""

    transient: float = 1.0  # measured / predicted, of the transient bytes
    context: int = CUDA_CONTEXT  # bytes that a process on a GPU takes beside torch's allocator


@dataclass(frozen=True)
class Prediction:
    """Bytes by part for each phase, at its highest."""

    device: DeviceBudget
    parts: dict[Phase, dict[str, int]]
    offloaded: tuple[Part, ...]  # of the trainer
    host: int  # bytes of the host's memory that these take, and layers' inputs
    micro_batch: MicroBatch
    seconds: dict[Phase, float]  # of a step, estimated: see `plan.seconds`
    exchange: dict[Phase, float]  # of these, between ranks: see `plan.exchange`
    timed: bool  # the seconds are of speeds published for the device; else only to compare by

    def total(self, phase: Phase) -> int:
        """Bytes of the device taken in this phase."""
        return sum(self.parts[phase].values())

    def allocated(self, phase: Phase) -> int:
        """Of these, what torch's allocator holds: what `torch.cuda.max_memory_allocated` shows."""
        return sum(size for part, size in self.parts[phase].items() if part not in _OUTSIDE_THE_ALLOCATOR)

    @property
    def free(self) -> int:
        """What is left of the device at the higher of the two peaks; negative where it does not fit, or where
        the host does not hold what is offloaded."""
        left, on_host = self.device.total - max(map(self.total, PHASES)), self.device.host_share - self.host
        return left if on_host >= 0 else min(left, on_host)


class Predictor:
    """Predictions for one run on one device, which need not be this machine's, at any sizes.

    On a device that is one of several, of each rank; `distributed.mode` says what it shares.

    Args:
        traces: of the run's model; making them takes seconds, so runs of one model share them.
    """

    def __init__(
        self,
        run: TrainConfig,
        traces: Traces,
        device: DeviceBudget,
        calibration: Calibration | None = None,
    ) -> None:
        """
        Raises:
            ValueError: a model that packing does not know, or LoRA modules that it does not have.
        """
        self.run, self.traces, self.device = run, traces, device
        self.calibration = calibration or Calibration()
        self.shape = traces.shape(run.model)
        self.dtype: torch.dtype = getattr(torch, run.model.dtype)
        self.on_gpu = device.kind == "cuda"
        self.sharded = device.ranks > 1 and run.distributed.mode == "shard"
        self.attention: str = run.model.attention
        if self.attention == "auto":
            target = torch.device(device.kind)
            self.attention = resolve_attention("auto", target, run.model.dtype, traces.config)
        self.engine = run.rollout.engine
        if self.engine == "auto":  # a plan for another machine does not ask what is installed on this one
            self.engine = "vllm" if self.on_gpu else "transformers"
        vllm = run.rollout.vllm
        self.sleeps = self.engine == "vllm" and self.on_gpu and vllm.sleep_level != 0
        # Adapters are merged into vLLM's weights, or stay beside them: beside those of 4 bits always.
        self.quantized = quantizes(run.model, traces.config)
        self.keeps_adapters = run.model.lora is not None and (vllm.lora_sync == "adapter" or self.quantized)
        merged_lora = run.model.lora is not None and not self.keeps_adapters
        wanted = self.on_gpu if vllm.share_weights == "auto" else vllm.share_weights
        separate = merged_lora or self.sharded or "experts" in self.shape.parameters
        self.shares_weights = wanted and not separate and vllm.tensor_parallel_size == 1
        # Its weights or, with adapters that it keeps beside them, what it never gets again.
        self.sends_weights = not self.shares_weights and not self.keeps_adapters
        named: set[Part] = set() if isinstance(run.memory.offload, str) else {*run.memory.offload}
        if run.optimizer.kind == "adamw_offload":
            named |= {*_STATE}
        self.offloaded = tuple(part for part in self.parts if part in named)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What of the trainer there is on a GPU to be offloaded, the cheapest first."""
        resident = self._resident(accumulates=False)
        stays = STAYS_SHARDED if self.sharded else None
        return tuple(part for part in PARTS if resident[part] and self.on_gpu and part != stays)

    def on_host(self, parts: Sequence[Part]) -> int:
        """Bytes that these parts take of the host's memory; gradients are only freed."""
        resident = self._resident(accumulates=False) | {"gradients": 0}
        return sum(resident[part] for part in parts)

    def inputs_on_host(self, batch: MicroBatch) -> int:
        """Bytes of the layers' inputs that wait in the host's memory for the backward."""
        return self.shape.inputs(batch.inputs) * (self.run.model.gradient_checkpointing == "offload")

    def predict(self, sizes: StepSizes, micro_batch: MicroBatch | None = None) -> Prediction:
        """Bytes at these sizes, or with a micro-batch other than their largest."""
        batch = micro_batch or largest_micro_batch(sizes)
        parts: dict[Phase, dict[str, int]] = {
            "update": self.update(sizes, batch),
            "rollout": self.rollout(sizes),
        }
        timed = bool(self.device.flops) and self.shape.itemsize <= 2  # published speeds are those of 16 bits
        of = self.run, self.shape, self.timed_on
        exchange: dict[Phase, float] = {"update": update_exchange(*of, batch), "rollout": sync_seconds(*of)}
        computing = self._seconds(sizes, batch)
        seconds = {phase: computing[phase] + exchange[phase] for phase in PHASES}
        host = self.host(batch)
        return Prediction(self.device, parts, self.offloaded, host, batch, seconds, exchange, timed)

    def update(self, sizes: StepSizes, batch: MicroBatch | None = None) -> dict[str, int]:
        """Bytes by part of the backward or, where something comes for it alone, of the optimiser's step."""
        batch = batch or largest_micro_batch(sizes)
        resident = self._resident(accumulates=self._accumulates(batch)) | {
            "packed batches": sizes.packed_bytes
        }
        if self.engine == "vllm":
            engine = self._vllm(sizes)
            stays = ("engine residue",) if self.sleeps else ("engine weights", "KV cache", "engine residue")
            resident |= {part: engine[part] for part in stays}
        away = [part for part in _STATE if part in self.offloaded]
        moments = [resident | dict.fromkeys(away, 0) | self._micro_batch(batch) | self._gathered()]
        # One tensor's state is there, the last one's leaves, the next one's comes.
        shape, trained = self.shape, self.shape.narrow + self.shape.wide
        step = resident | {"gradients": self._held(4 * trained)}
        visiting = {
            "optimizer": shape.moments(self.run.optimizer.kind) * shape.neighbours // trained,
            "master": 4 * shape.neighbours,
        }
        visitors = {part: min(resident[part], self._own(visiting[part])) for part in away}
        if away or self.device.ranks > 1:
            moments.append(step | visitors | self._exchanged())
        if self.run.optimizer.stochastic_rounding:  # one master, then 16 bits of chance beside it
            step |= {"master": self._own(4 * shape.largest)}
            moments.append(step | visitors | self._exchanged() | {"master": self._own(6 * shape.largest)})
        if self.run.optimizer.kind == "adamw_8bit" and not self.on_gpu:
            moments.append(step | {"optimizer": step["optimizer"] + _STEP_8BIT * shape.largest})
        return max(map(self._with_overheads, moments), key=lambda parts: sum(parts.values()))

    def rollout(self, sizes: StepSizes) -> dict[str, int]:
        """Bytes by part while the engine generates."""
        engine = self._vllm(sizes) if self.engine == "vllm" else self._transformers(sizes)
        parts = self._resident(accumulates=False) | engine | dict.fromkeys(self.offloaded, 0)
        adapts = self.run.memory.offload != "none" and self.offloaded != self.parts
        if self.sleeps and adapts:  # else the hand-over offloads more
            parts["left free"] = max(0, MARGIN - parts["engine workspace"])
        return self._with_overheads(parts)

    def fits(self, sizes: StepSizes, spare: int = 0) -> bool:
        """Whether both phases do, and so many bytes besides, and the host what is offloaded."""
        room = self.device.total - spare
        return self.host(largest_micro_batch(sizes)) <= self.device.host_share and all(
            sum(parts(sizes).values()) <= room for parts in (self.update, self.rollout)
        )

    def host(self, batch: MicroBatch) -> int:
        """Bytes of the host's memory that a rank's offloaded parts and its layers' inputs take."""
        return self.on_host(self.offloaded) + self.inputs_on_host(batch)

    @property
    def timed_on(self) -> DeviceBudget:
        """The device, or one to compare by."""
        known = self.device if self.device.flops else device_budget("H100")
        return replace(known, ranks=self.device.ranks, node=self.device.node)

    def _seconds(self, sizes: StepSizes, batch: MicroBatch) -> dict[Phase, float]:
        device = self.timed_on
        # An engine's own copy of the weights is in full precision.
        copied = self.engine == "vllm" and not self.shares_weights
        engine_shape = replace(self.shape, quantized=0) if copied else self.shape
        work = whole_step(sizes)
        work = replace(work, count=batch.count * sizes.minibatches)
        return {
            "update": update_seconds(self.run, self.shape, device, work)
            + transfer_seconds(self.run, self.shape, device, self.offloaded),
            "rollout": rollout_seconds(engine_shape, device, sizes, self.engine, self.rows_in_flight(sizes))
            + SLEEP_SECONDS * self.sleeps,
        }

    def _resident(self, *, accumulates: bool) -> dict[str, int]:
        """The trainer's tensors that outlive a micro-batch or, with nothing accumulated, the update."""
        shape, needs_reference = self.shape, self.run.loss.needs_reference and self.run.model.lora is None
        steps = shape.trainable_tensors * (512 if self.on_gpu else 4)
        if self.run.optimizer.kind == "adamw_8bit":
            steps = 0
        return {
            "weights": self._held(shape.bytes),
            "master": self._own(4 * shape.narrow) * (not self.run.optimizer.stochastic_rounding),
            "gradients": self._held(4 * shape.narrow + 4 * shape.wide * accumulates),
            "optimizer": self._own(shape.moments(self.run.optimizer.kind)) + steps,
            "reference": self._held(shape.bytes) if needs_reference else 0,
        }

    def _own(self, size: int) -> int:
        """Bytes of what each rank has its rows of, in either mode."""
        return -(-size // self.device.ranks)

    def _held(self, size: int) -> int:
        """Bytes of what mode shard shards, and mode replicate does not."""
        return self._own(size) if self.sharded else size

    def _accumulates(self, batch: MicroBatch) -> bool:
        """Whether gradients outlive the backward that makes them: until they are exchanged, or sharded."""
        return batch.count > 1 or self.device.ranks > 1

    def _gathered(self) -> dict[str, int]:
        """What FSDP2 has whole: a layer and the next one, and the layer's gradient, as it is and in float32.

        The head's weight and gradient stay from the loss to the end, unless hidden states come to its rows.
        """
        if not self.sharded:
            return {}
        shape = self.shape
        layers = 2 * shape.layer + (shape.itemsize + 4) * shape.layer_trained
        head = shape.itemsize * shape.vocabulary * shape.hidden * (1 + shape.head_trained)
        return {"gathered": layers + head * (not self._head_sharded)}

    def _exchanged(self) -> dict[str, int]:
        """What an optimiser step of mode replicate adds: its rows of the summed gradients, and a bucket."""
        if self.sharded or self.device.ranks == 1:
            return {}
        trained = self.shape.narrow + self.shape.wide
        return {"exchange": self._own(4 * trained) + max(2 * BUCKET, 4 * self.shape.largest)}

    def _micro_batch(self, batch: MicroBatch) -> dict[str, int]:
        """Transient bytes of a micro-batch, at the moment when their sum is largest."""
        shape = self.shape
        model = self.run.model
        dense = "experts" not in self.shape.parameters
        fused = self.on_gpu and (model.liger_kernels is True or (dense and model.compile is not False))
        tiles = (
            1
            if model.gradient_checkpointing in (False, "auto")
            else -(-batch.inputs // recompute.TILE_TOKENS)
        )
        first = not self._accumulates(batch)
        timeline = self.traces.update(model, self.attention, first=first, fused=fused, in_tiles=tiles > 1)
        ranks = self.device.ranks if self._head_sharded else 1
        call = Workload(
            rows=batch.targets * ranks,
            vocabulary=-(-shape.vocabulary // ranks),
            dtype=self.dtype,
            softcap=shape.softcap,
            extra_statistics=1,
            dense_gradient=self.run.loss.needs_entropy,
            hidden_size=shape.hidden,
            trainable=shape.head_trained,
        )
        head = head_bytes(self.device.head_device, call, weight_grad=shape.head_trained)
        in_16_bits = shape.itemsize if shape.itemsize < 4 else 0
        sizes = {"tokens": batch.inputs, "targets": batch.targets, "tile": -(-batch.inputs // tiles)}
        square = batch.sequence**2  # of the scores of one call
        masks = {
            "joined": batch.joined * (batch.sequence if self.attention == "sdpa" else batch.prompt),
            "mask": shape.itemsize * batch.masked,
            "scores": shape.heads * (batch.documents * square + batch.masked) * (2 * 4 + in_16_bits),
            "scores_transient": shape.heads * square * SOFTCAP_BYTES_PER_SCORE,
        }
        heads = {f"head_{when}": size for when, size in asdict(head).items()}
        if self._head_sharded:
            heads["head_kept"] += shape.itemsize * call.rows * shape.hidden  # all ranks' hidden states
        plain, with_masks, with_head, whole = (
            timeline.live(sizes | more) for more in ({}, masks, heads, masks | heads)
        )
        peak = whole.argmax()
        activations = min(plain[timeline.forward_end - 1], plain[peak])
        found = {
            "activations": activations,
            "gradients in flight": plain[peak] - activations,
            "head": with_head[peak] - plain[peak],
            "masks": with_masks[peak] - plain[peak],
        }
        return {part: int(size * self.calibration.transient) for part, size in found.items()}

    def _vllm(self, sizes: StepSizes) -> dict[str, int]:
        """Bytes of vLLM awake, with as many completions in flight as it may have."""
        shape, vllm, sequences = self.shape, self.run.rollout.vllm, sizes.in_flight
        most, read = _BATCHED_TOKENS[self.device.total >= _LARGE_GPU], self._read_at_once(sizes)
        prefill_tokens = min(most, read.prompts * read.prompt_length)
        prefill = int(self.traces.forward(self.run.model).live({"tokens": prefill_tokens}).max())
        # Each of them at its longest, none preempted. A group shares the full pages of its prompt.
        shared = sizes.prompt_length // BLOCK_TOKENS
        own = -(-sizes.sequence_length // BLOCK_TOKENS) - shared
        pages = min(sizes.prompts, sequences) * shared + sequences * own
        pages = max(pages, -(-sizes.longest // BLOCK_TOKENS)) + 1  # vLLM's null page
        needed = pages * BLOCK_TOKENS * shape.paged_kv_bytes_per_token
        return {
            "engine weights": self._base_bytes * (not self.shares_weights)
            + shape.itemsize * shape.parameters.get("adapters", 0) * self.keeps_adapters,
            "KV cache": needed if vllm.kv_cache_gib is None else int(vllm.kv_cache_gib * GIB),
            "engine workspace": prefill + 4 * _SAMPLER_COPIES * sequences * shape.vocabulary,
            "engine residue": ENGINE_RESIDUE,
        }

    def _transformers(self, sizes: StepSizes) -> dict[str, int]:
        """Bytes of our own engine at the end of its longest batch, when the cache is full."""
        shape, length = self.shape, sizes.completion_length
        prompts, rows = self.in_flight(sizes)
        sizes = self._read_at_once(sizes)
        batch = {"tokens": prompts * sizes.prompt_length, "targets": prompts}
        prefill = self.traces.forward(self.run.model).live(batch).max()
        prefill += shape.itemsize * prompts * shape.vocabulary
        scores = 4 * rows * shape.heads * (sizes.prompt_length + 2 * length)
        drawn = min(rows * shape.vocabulary, SLICE.get(self.device.kind, SLICE_ELSEWHERE))
        decode = rows * shape.vocabulary * shape.itemsize + 4 * _DRAW_COPIES * drawn + scores
        kv_cache = rows * shape.kv_bytes(sizes.sequence_length)
        if self._shares_prefix:
            numbers = [layer.numbers for layer in shape.layers]
            growing = rows * max(numbers) * length // 2  # a buffer that grows is copied
            tokens = prompts * sizes.prompt_length + rows * length
            itemsize = shape.itemsize if self.on_gpu else 4  # CPUs decode in float32
            kv_cache = itemsize * (tokens * sum(numbers) + growing)
        weights = self._base_bytes if self.sharded else 0
        return {
            "engine weights": weights,
            "KV cache": kv_cache,
            "engine workspace": max(int(prefill), decode),
        }

    def rows_in_flight(self, sizes: StepSizes) -> int:
        """Completions that the engine decodes at once."""
        return sizes.in_flight if self.engine == "vllm" else self.in_flight(sizes)[1]

    def in_flight(self, sizes: StepSizes) -> tuple[int, int]:
        """(prompts, completions) that the transformers engine decodes at once."""
        sizes = self._read_at_once(sizes)

        def held(rows: int) -> int:
            if not self._shares_prefix:
                return rows * sizes.sequence_length
            prompts = -(-rows // sizes.generations)
            return prompts * sizes.prompt_length + rows * sizes.completion_length

        budget = self.run.rollout.max_batch_tokens
        if budget is None and not self.on_gpu:
            budget = max(CPU_BATCH_TOKENS, held(1))
        rows = sizes.completions
        if budget is not None:
            rows = largest(1, rows, lambda count: held(count) <= budget) or 1
        return -(-rows // sizes.generations), rows

    def _read_at_once(self, sizes: StepSizes) -> StepSizes:
        """With turns, completions come back as prompts of their own, as long as the longest of a batch."""
        if not self.run.rollout.has_turns:
            return sizes
        own = {"prompts": sizes.completions, "generations": 1, "prompt_length": sizes.sequence_length}
        return replace(sizes, **own)

    @property
    def _base_bytes(self) -> int:
        """Of the model without adapters, whole, and in full precision."""
        parameters = self.shape.parameters
        return self.shape.itemsize * (sum(parameters.values()) - parameters.get("adapters", 0))

    @property
    def _head_sharded(self) -> bool:
        return self.sharded and self.run.distributed.head == "sharded"

    @property
    def _shares_prefix(self) -> bool:
        """As `SharedPrefixDecoder.supports`: plain full attention in every layer."""
        capped = getattr(self.traces.config.get_text_config(), "attn_logit_softcapping", None)
        return all(layer.window is None for layer in self.shape.layers) and not capped

    def _with_overheads(self, parts: dict[str, int]) -> dict[str, int]:
        """A phase's parts with what lies outside torch's allocator; parts of no bytes are left out."""
        if self.on_gpu:
            workspace = CUBLAS_WORKSPACE.get(self.device.capability[0], _SMALL_CUBLAS_WORKSPACE)
            parts = parts | {"cuBLAS workspace": workspace, "CUDA context": self.calibration.context}
        parts = parts | {"fragmentation": int(FRAGMENTATION * transient_bytes(parts))}
        return {part: size for part, size in parts.items() if size}


def transient_bytes(parts: dict[str, int]) -> int:
    """Of the allocated bytes of a phase, those that are freed again within it."""
    return sum(parts.get(part, 0) for part in _TRANSIENT)
