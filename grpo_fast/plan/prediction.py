"""What a rank takes at given sizes: bytes by part, for the update and for the rollout, and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.shards import BUCKET
from grpo_fast.head.plan import Workload
from grpo_fast.plan.devices import GIB, DeviceBudget, device_budget
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS
from grpo_fast.plan.seconds import (
    SLEEP_SECONDS,
    rollout_seconds,
    sync_seconds,
    transfer_seconds,
    update_exchange,
    update_seconds,
)
from grpo_fast.plan.sizes import MicroBatch, StepSizes, largest, largest_micro_batch, whole_step
from grpo_fast.plan.trace import Traces
from grpo_fast.policy import layers
from grpo_fast.policy.load import resolve_attention, resolve_dtype
from grpo_fast.policy.quantization import quantizes
from grpo_fast.rollout.config import Part
from grpo_fast.rollout.handover import MARGIN, PARTS
from grpo_fast.rollout.sampling import SLICE, SLICE_ELSEWHERE
from grpo_fast.rollout.transformers import CPU_BATCH_TOKENS

Phase = Literal["update", "rollout"]
PHASES: tuple[Phase, ...] = ("update", "rollout")

STAYS_SHARDED: Part = "reference"  # which mode shard keeps in rows, and never offloads

# Bytes of cuBLAS' workspace as torch takes it, by major compute capability, and elsewhere.
CUBLAS_WORKSPACE, SMALL_CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}, 8 << 20

FRAGMENTATION = 0.05  # of the transient bytes, which the allocator may waste

SOFTCAP_BYTES_PER_SCORE = 18
"""Transient bytes of each attention score of one sequence on a CPU with a softcap (measured; Gemma 2 within
7 %)."""

ENGINE_RESIDUE = int(0.4 * GIB)
"""Of vLLM, awake or asleep: graphs, handles. Seen on an H200 with vLLM 0.26 and Qwen2.5-1.5B's shape."""

BUSY = 8_192  # tokens of a micro-batch that keep a GPU busy

_LARGE_GPU = 70 * GIB  # from here on vLLM takes the larger of its two defaults
_BATCHED_TOKENS = (8192, 16384)  # tokens of one forward of vLLM
_STATE: tuple[Part, ...] = ("optimizer", "master")  # what an optimiser step alone reads
_STEP_8BIT = 20  # transient bytes of a number whose 8-bit moments a CPU steps
_SAMPLER_COPIES = 3  # of float32 logits in vLLM's sampler: logits, probabilities, sorted or masked ones
_DRAW_COPIES = 4  # of a slice of float32 logits in ours

_TRANSIENT = (
    *("activations", "gradients in flight", "head", "masks", "packed batches", "engine workspace"),
    *("gathered", "exchange"),
)
_OUTSIDE_THE_ALLOCATOR = ("CUDA context", "engine residue", "fragmentation", "left free")


@dataclass(frozen=True)
class Prediction:
    """A run at its sizes, and what it takes of each rank."""

    predictor: Predictor
    sizes: StepSizes
    micro_batch: MicroBatch  # the largest
    parts: dict[Phase, dict[str, int]]  # bytes, when each phase takes most

    def total(self, phase: Phase) -> int:
        """Bytes of the device taken in this phase."""
        return sum(self.parts[phase].values())

    def allocated(self, phase: Phase) -> int:
        """Of these, what torch's allocator holds: what `torch.cuda.max_memory_allocated` shows."""
        return sum(size for part, size in self.parts[phase].items() if part not in _OUTSIDE_THE_ALLOCATOR)

    @property
    def host(self) -> int:
        """Bytes of the host's memory that offloaded parts take, and layers' inputs until the backward."""
        predictor = self.predictor
        offloads_inputs = predictor.run.model.gradient_checkpointing == "offload"
        inputs = predictor.shape.inputs(self.micro_batch.inputs) * offloads_inputs
        return predictor.on_host(predictor.offloaded) + inputs

    @property
    def free(self) -> int:
        """Bytes left of the device when most is taken; negative where it does not fit, or where the host does
        not hold what is offloaded."""
        device = self.predictor.device
        left, on_host = device.total - max(map(self.total, PHASES)), device.host_share - self.host
        return left if on_host >= 0 else min(left, on_host)

    @cached_property
    def exchange(self) -> dict[Phase, float]:
        """Seconds of a step between ranks, estimated."""
        predictor = self.predictor
        return {"update": update_exchange(predictor, self.micro_batch), "rollout": sync_seconds(predictor)}

    @cached_property
    def seconds(self) -> dict[Phase, float]:
        """Of a step, those between ranks among them, estimated."""
        predictor, sizes = self.predictor, self.sizes
        work = whole_step(sizes, self.micro_batch.count * sizes.minibatches)
        update = update_seconds(predictor, work) + transfer_seconds(predictor)
        rollout = rollout_seconds(predictor, sizes) + SLEEP_SECONDS * predictor.sleeps
        return {"update": update + self.exchange["update"], "rollout": rollout + self.exchange["rollout"]}

    @property
    def is_busy(self) -> bool:
        """Whether micro-batches are as large as anything gains by, or as was asked for."""
        tokens = self.sizes.micro_batch_tokens
        asked = tokens == self.predictor.run.micro_batch_tokens
        return tokens >= BUSY or asked or self.micro_batch.count == 1

    @property
    def mode(self) -> str:
        """How the ranks share the model; empty for one."""
        return self.predictor.run.distributed.mode if self.predictor.device.ranks > 1 else ""

    @property
    def cost(self) -> tuple[int, float]:
        """Less is better: bytes that are missing, then seconds a completion."""
        return max(0, -self.free), sum(self.seconds.values()) / self.sizes.generations

    @property
    def values(self) -> dict[str, Any]:
        """By dotted key what the plan decides where the configuration does not."""
        predictor, sizes = self.predictor, self.sizes
        run, vllm = predictor.run, predictor.run.rollout.vllm
        values: dict[str, Any] = {
            "rollout.num_generations": sizes.generations,
            "micro_batch_tokens": sizes.micro_batch_tokens,
            "model.gradient_checkpointing": run.model.gradient_checkpointing,
            "memory.offload": list(predictor.offloaded),
        }
        if predictor.engine == "vllm" and predictor.on_gpu:
            values["rollout.vllm.sleep_level"] = vllm.sleep_level
            values["rollout.vllm.max_sequences"] = sizes.in_flight
            if vllm.gpu_memory_utilization is None:
                kv_cache = self.parts["rollout"]["KV cache"]
                values["rollout.vllm.kv_cache_gib"] = math.ceil(100 * kv_cache / GIB) / 100
        if self.mode:
            values["distributed.mode"] = run.distributed.mode
        if predictor.sharded:
            values["distributed.head"] = run.distributed.head
        return values


def with_dtype(run: TrainConfig, device: str) -> TrainConfig:
    """The run with its `model.dtype` told, which only bfloat16 can be where weights are rounded by chance."""
    dtype = "bfloat16" if run.optimizer.stochastic_rounding else resolve_dtype(run.model.dtype, device)
    return run.model_copy(update={"model": run.model.model_copy(update={"dtype": dtype})})


class Predictor:
    """Predictions for one run on one device, which need not be this machine's, at any sizes.

    On a device that is one of several, of each rank; `distributed.mode` says what it shares.

    Args:
        traces: of the run's model; making them takes seconds, so runs of one model share them.

    Raises:
        ValueError: a model that packing does not know, or LoRA modules that it does not have.
    """

    def __init__(self, run: TrainConfig, traces: Traces, device: DeviceBudget) -> None:
        run = with_dtype(run, device.kind)
        self.run, self.traces, self.device = run, traces, device
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
        vllm, adapted = run.rollout.vllm, run.model.lora is not None
        self.sleeps = self.engine == "vllm" and self.on_gpu and vllm.sleep_level != 0
        # Adapters are merged into vLLM's weights, or stay beside them: beside those of 4 bits always.
        self.quantized = quantizes(run.model, traces.config)
        self.keeps_adapters = adapted and (vllm.lora_sync == "adapter" or self.quantized)
        wanted = self.on_gpu if vllm.share_weights == "auto" else vllm.share_weights
        merged = adapted and not self.keeps_adapters
        separate = merged or self.sharded or "experts" in self.shape.parameters
        self.shares_weights = wanted and not separate and vllm.tensor_parallel_size == 1
        # vLLM's own copy of the weights is in full precision.
        copied = self.engine == "vllm" and not self.shares_weights
        self.engine_shape = replace(self.shape, quantized=0) if copied else self.shape
        # Its weights or, with adapters that it keeps beside them, what it never gets again.
        self.sends_weights = not self.shares_weights and not self.keeps_adapters
        # What of the trainer can be offloaded, the cheapest first.
        resident = self._resident(accumulates=False)
        stays = STAYS_SHARDED if self.sharded else None
        self.parts = tuple(part for part in PARTS if resident[part] and self.on_gpu and part != stays)
        named: set[Part] = set() if isinstance(run.memory.offload, str) else {*run.memory.offload}
        if run.optimizer.kind == "adamw_offload":
            named |= {*_STATE}
        self.offloaded = tuple(part for part in self.parts if part in named)
        # Published speeds are those of 16 bits; elsewhere seconds are another GPU's, to compare by.
        self.timed = bool(device.flops) and self.shape.itemsize <= 2
        known = device if device.flops else device_budget("H100")
        self.timed_on = replace(known, ranks=device.ranks, node=device.node)

    def predict(self, sizes: StepSizes) -> Prediction:
        """What it takes at these sizes."""
        batch = largest_micro_batch(sizes)
        return Prediction(
            self, sizes, batch, {"update": self._update(sizes, batch), "rollout": self._rollout(sizes)}
        )

    def largest_fitting(
        self, sizes: StepSizes, name: str, low: int, most: int, *, spare: int = 0
    ) -> int | None:
        """The largest value of one of the sizes with which `spare` bytes are left; None: not even `low`."""
        return largest(low, most, lambda value: self.predict(replace(sizes, **{name: value})).free >= spare)

    def on_host(self, parts: Sequence[Part]) -> int:
        """Bytes that these parts take of the host's memory; gradients are only freed."""
        resident = self._resident(accumulates=False) | {"gradients": 0}
        return sum(resident[part] for part in parts)

    def rows_in_flight(self, sizes: StepSizes) -> int:
        """Completions that the engine decodes at once."""
        if self.engine == "vllm":
            return sizes.in_flight
        read = self._read_at_once(sizes)

        def tokens(rows: int) -> int:
            if not self._shares_prefix:
                return rows * read.sequence_length
            return -(-rows // read.generations) * read.prompt_length + rows * read.completion_length

        budget = self.run.rollout.max_batch_tokens
        if budget is None:
            if self.on_gpu:
                return sizes.completions
            budget = max(CPU_BATCH_TOKENS, tokens(1))
        return largest(1, sizes.completions, lambda rows: tokens(rows) <= budget) or 1

    def _update(self, sizes: StepSizes, batch: MicroBatch) -> dict[str, int]:
        """Bytes by part of the backward or, where something comes for it alone, of the optimiser's step."""
        shape, optimizer, several = self.shape, self.run.optimizer, self.device.ranks > 1
        # Gradients outlive the backward that makes them until they are exchanged, or sharded.
        accumulates = batch.count > 1 or several
        resident = self._resident(accumulates=accumulates) | {"packed batches": sizes.packed_bytes}
        if self.engine == "vllm":
            engine = self._vllm(sizes)
            stays = ("engine residue",) if self.sleeps else ("engine weights", "KV cache", "engine residue")
            resident |= {part: engine[part] for part in stays}
        away = [part for part in _STATE if part in self.offloaded]
        backward = self._micro_batch(batch, first=not accumulates) | self._gathered()
        moments = [resident | dict.fromkeys(away, 0) | backward]
        # One tensor's state is there, the last one's leaves, the next one's comes.
        trained = shape.narrow + shape.wide
        visiting = {
            "optimizer": shape.moments(optimizer.kind) * shape.neighbours // trained,
            "master": 4 * shape.neighbours,
        }
        visitors = {part: min(resident[part], self._own(visiting[part])) for part in away}
        step = resident | {"gradients": self._held(4 * trained)}
        if away or several:
            moments.append(step | visitors | self._exchanged())
        if optimizer.stochastic_rounding:  # one master, then 16 bits of chance beside it
            step |= {"master": self._own(4 * shape.largest)}
            moments.append(step | visitors | self._exchanged() | {"master": self._own(6 * shape.largest)})
        if optimizer.kind == "adamw_8bit" and not self.on_gpu:
            moments.append(step | {"optimizer": step["optimizer"] + _STEP_8BIT * shape.largest})
        return max(map(self._with_overheads, moments), key=lambda parts: sum(parts.values()))

    def _rollout(self, sizes: StepSizes) -> dict[str, int]:
        """Bytes by part while the engine generates."""
        engine = self._vllm(sizes) if self.engine == "vllm" else self._transformers(sizes)
        parts = self._resident(accumulates=False) | engine | dict.fromkeys(self.offloaded, 0)
        adapts = self.run.memory.offload != "none" and self.offloaded != self.parts
        if self.sleeps and adapts:  # else the hand-over offloads more
            parts["left free"] = max(0, MARGIN - parts["engine workspace"])
        return self._with_overheads(parts)

    def _resident(self, *, accumulates: bool) -> dict[str, int]:
        """The trainer's tensors that outlive a micro-batch or, with nothing accumulated, the update."""
        shape, optimizer = self.shape, self.run.optimizer
        steps = shape.trainable_tensors * (512 if self.on_gpu else 4)
        moments = self._own(shape.moments(optimizer.kind))
        needs_reference = self.run.loss.needs_reference and self.run.model.lora is None
        return {
            "weights": self._held(shape.bytes),
            "master": self._own(4 * shape.narrow) * (not optimizer.stochastic_rounding),
            "gradients": self._held(4 * shape.narrow + 4 * shape.wide * accumulates),
            "optimizer": moments if optimizer.kind == "adamw_8bit" else moments + steps,
            "reference": self._held(shape.bytes) * needs_reference,
        }

    def _own(self, size: int) -> int:
        """Bytes of what each rank has its rows of, in either mode."""
        return -(-size // self.device.ranks)

    def _held(self, size: int) -> int:
        """Bytes of what mode shard shards, and mode replicate does not."""
        return self._own(size) if self.sharded else size

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

    def _micro_batch(self, batch: MicroBatch, *, first: bool) -> dict[str, int]:
        """Transient bytes of a micro-batch, at the moment when their sum is largest."""
        shape, model = self.shape, self.run.model
        dense = "experts" not in shape.parameters
        fused = self.on_gpu and (model.liger_kernels is True or (dense and model.compile is not False))
        recomputes = model.gradient_checkpointing not in (False, "auto")
        tiles = -(-batch.inputs // layers.TILE_TOKENS) if recomputes else 1
        timeline = self.traces.update(model, self.attention, first=first, fused=fused, in_tiles=tiles > 1)
        ranks = self.device.ranks if self._head_sharded else 1
        call = Workload(
            rows=batch.targets * ranks,
            vocabulary=-(-shape.vocabulary // ranks),
            dtype=self.dtype,
            softcap=shape.softcap,
            extra_statistics=1,
            tolerance=model.head_tolerance,
            entropy_gradient=self.run.loss.needs_entropy,
            hidden_size=shape.hidden,
            trainable=shape.head_trained,
        )
        head = head_bytes(self.device.head_device, call, weight_grad=shape.head_trained)
        heads = {f"head_{when}": size for when, size in asdict(head).items()}
        if self._head_sharded:
            heads["head_kept"] += shape.itemsize * call.rows * shape.hidden  # all ranks' hidden states
        square = batch.sequence**2  # of the scores of one call
        per_score = 2 * 4 + (shape.itemsize if shape.itemsize < 4 else 0)
        masks = {
            "joined": batch.joined * (batch.sequence if self.attention == "sdpa" else batch.prompt),
            "mask": shape.itemsize * batch.masked,
            "scores": shape.heads * (batch.documents * square + batch.masked) * per_score,
            "scores_transient": shape.heads * square * SOFTCAP_BYTES_PER_SCORE,
        }
        sizes = {"tokens": batch.inputs, "targets": batch.targets, "tile": -(-batch.inputs // tiles)}
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
        return {part: int(size * self.device.transient) for part, size in found.items()}

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
        adapters = shape.itemsize * shape.parameters.get("adapters", 0)
        return {
            "engine weights": self._base_bytes * (not self.shares_weights) + adapters * self.keeps_adapters,
            "KV cache": needed if vllm.kv_cache_gib is None else int(vllm.kv_cache_gib * GIB),
            "engine workspace": prefill + 4 * _SAMPLER_COPIES * sequences * shape.vocabulary,
            "engine residue": ENGINE_RESIDUE,
        }

    def _transformers(self, sizes: StepSizes) -> dict[str, int]:
        """Bytes of our own engine at the end of its longest batch, when the cache is full."""
        shape, length, rows = self.shape, sizes.completion_length, self.rows_in_flight(sizes)
        read = self._read_at_once(sizes)
        prompts = -(-rows // read.generations)
        batch = {"tokens": prompts * read.prompt_length, "targets": prompts}
        prefill = self.traces.forward(self.run.model).live(batch).max()
        prefill += shape.itemsize * prompts * shape.vocabulary
        scores = 4 * rows * shape.heads * (read.prompt_length + 2 * length)
        drawn = min(rows * shape.vocabulary, SLICE.get(self.device.kind, SLICE_ELSEWHERE))
        decode = rows * shape.vocabulary * shape.itemsize + 4 * _DRAW_COPIES * drawn + scores
        kv_cache = rows * shape.kv_bytes(read.sequence_length)
        if self._shares_prefix:
            numbers = [layer.numbers for layer in shape.layers]
            growing = rows * max(numbers) * length // 2  # a buffer that grows is copied
            itemsize = shape.itemsize if self.on_gpu else 4  # CPUs decode in float32
            kv_cache = itemsize * ((batch["tokens"] + rows * length) * sum(numbers) + growing)
        return {
            "engine weights": self._base_bytes * self.sharded,
            "KV cache": kv_cache,
            "engine workspace": max(int(prefill), decode),
        }

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
            workspace = CUBLAS_WORKSPACE.get(self.device.capability[0], SMALL_CUBLAS_WORKSPACE)
            parts = parts | {"cuBLAS workspace": workspace, "CUDA context": self.device.context}
        parts = parts | {"fragmentation": int(FRAGMENTATION * transient_bytes(parts))}
        return {part: size for part, size in parts.items() if size}


def transient_bytes(parts: Mapping[str, int]) -> int:
    """Of a phase's allocated bytes, those that are freed again within it."""
    return sum(parts.get(part, 0) for part in _TRANSIENT)
