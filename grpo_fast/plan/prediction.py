"""What a rank takes at given sizes: bytes by part, for the update and for the rollout, and seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch

from grpo_fast.config.rollout import Part
from grpo_fast.config.schema import TrainConfig
from grpo_fast.distributed.shards import BUCKET
from grpo_fast.head.plan import Workload
from grpo_fast.plan.devices import GIB, DeviceBudget, device_budget
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.model_shape import Shapes
from grpo_fast.plan.seconds import (
    SLEEP_SECONDS,
    rollout_seconds,
    sync_seconds,
    transfer_seconds,
    update_exchange,
    update_seconds,
)
from grpo_fast.plan.sizes import MicroBatch, StepSizes, largest, largest_micro_batch, whole_step
from grpo_fast.policy.architecture import packing_obstacle
from grpo_fast.policy.attention import PackedPrice, has_sinks
from grpo_fast.policy.attention import price as attention_price
from grpo_fast.policy.load import resolve_attention, resolve_dtype
from grpo_fast.policy.quantization import quantizes
from grpo_fast.rollout.engines import Demand, EnginePrice, Trained, engine_kind
from grpo_fast.rollout.handover import MARGIN, PARTS

Phase = Literal["update", "rollout"]
PHASES: tuple[Phase, ...] = ("update", "rollout")

STAYS_SHARDED: Part = "reference"  # which mode shard keeps in rows, and never offloads

# Bytes of cuBLAS' workspace as torch takes it, by major compute capability, and elsewhere.
CUBLAS_WORKSPACE, SMALL_CUBLAS_WORKSPACE = {9: 32 << 20, 10: 32 << 20}, 8 << 20

FRAGMENTATION = 0.05  # of the transient bytes, which the allocator may waste

BUSY = 8_192  # tokens of a micro-batch that keep a GPU busy

_STATE: tuple[Part, ...] = ("optimizer", "master")  # what an optimiser step alone reads

_TRANSIENT = (
    *("activations", "gradients in flight", "head", "masks", "packed batches", "engine workspace"),
    *("gathered", "exchange"),
)
_OUTSIDE_THE_ALLOCATOR = (
    *("CUDA context", "engine residue", "fragmentation", "left free", "kept when freed", "libraries"),
)


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
        if predictor.engine.name == "vllm" and predictor.on_gpu:
            values["rollout.vllm.sleep_level"] = vllm.sleep_level
            values["rollout.vllm.max_sequences"] = sizes.in_flight
            kv_cache = self.parts["rollout"].get("KV cache")
            if kv_cache and vllm.gpu_memory_utilization is None:
                values["rollout.vllm.kv_cache_gib"] = math.ceil(100 * kv_cache / GIB) / 100
        if self.mode:
            values["distributed.mode"] = run.distributed.mode
        return values


def with_dtype(run: TrainConfig, device: str) -> TrainConfig:
    """The run with its `model.dtype` told, which only bfloat16 can be where weights are rounded by chance."""
    dtype = "bfloat16" if run.optimizer.stochastic_rounding else resolve_dtype(run.model.dtype, device)
    return run.model_copy(update={"model": run.model.model_copy(update={"dtype": dtype})})


class Predictor:
    """Predictions for one run on one device, which need not be this machine's, at any sizes.

    On a device that is one of several, of each rank; `distributed.mode` says what it shares.

    Args:
        shapes: of the run's model; making them takes seconds, so runs of one model share them.

    Raises:
        ValueError: a model that packing does not know, or LoRA modules that it does not have.
    """

    def __init__(self, run: TrainConfig, shapes: Shapes, device: DeviceBudget) -> None:
        run = with_dtype(run, device.kind)
        self.run, self.shapes, self.device = run, shapes, device
        self.shape = shapes.of(run.model)
        self.dtype: torch.dtype = getattr(torch, run.model.dtype)
        self.on_gpu = device.kind == "cuda"
        self.sharded = device.ranks > 1 and run.distributed.mode == "shard"
        self.attention: str = run.model.attention
        if self.attention == "auto":
            target = torch.device(device.kind)
            self.attention = resolve_attention("auto", target, run.model.dtype, shapes.config)
        self.own_attention = packing_obstacle(shapes.config) is not None
        self.packs = not self.own_attention and run.model.packing == "auto"
        name = run.rollout.engine
        if name == "auto":  # a plan for another machine does not ask what is installed on this one
            name = "vllm" if self.on_gpu else "transformers"
        self.engine = engine_kind(name)
        self.quantized = quantizes(run.model, shapes.config)
        adapted, experts = run.model.lora is not None, "experts" in self.shape.parameters
        self.trained = Trained(self.on_gpu, adapted, self.quantized, self.sharded, experts)
        self.sleeps = self.engine.sleeps(run.rollout, self.on_gpu)
        self.weights = self.engine.weights(run.rollout, self.trained)
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
        sizes = replace(sizes, shares_prompts=self.packs)
        batch = largest_micro_batch(sizes)
        return Prediction(
            self, sizes, batch, {"update": self._update(sizes, batch), "rollout": self._rollout(sizes)}
        )

    def largest_fitting(self, sizes: StepSizes, name: str, low: int, most: int, spare: int = 0) -> int | None:
        """The largest value of one of the sizes with which `spare` bytes are left; None: not even `low`."""
        changed: Callable[..., StepSizes] = partial(replace, sizes)
        return largest(low, most, lambda value: self.predict(changed(**{name: value})).free >= spare)

    def on_host(self, parts: Sequence[Part]) -> int:
        """Bytes that these parts take of the host's memory; gradients are only freed."""
        resident = self._resident(accumulates=False) | {"gradients": 0}
        return sum(resident[part] for part in parts)

    def engine_price(self, sizes: StepSizes) -> EnginePrice:
        """What the engine holds, and how many completions it decodes at once."""
        given = self.run.rollout, self.trained, self.shape, sizes
        return self.engine.price(Demand(*given, self.device.total))

    def _update(self, sizes: StepSizes, batch: MicroBatch) -> dict[str, int]:
        """Bytes by part of the backward or, where something comes for it alone, of the optimiser's step."""
        shape, optimizer, several = self.shape, self.run.optimizer, self.device.ranks > 1
        # Gradients outlive the backward that makes them until they are exchanged, or sharded.
        accumulates = batch.count > 1 or several
        resident = self._resident(accumulates=accumulates) | {"packed batches": sizes.packed_bytes}
        stays = ("engine residue",) if self.sleeps else self.engine.stays
        engine = self._engine(sizes)
        resident |= {part: engine[part] for part in stays}
        away = [part for part in _STATE if part in self.offloaded]
        backward = self._micro_batch(batch, first=not accumulates) | self._gathered()
        moments = [resident | dict.fromkeys(away, 0) | backward]
        # One tensor's state is there, the last one's leaves, the next one's comes.
        moments_there = shape.moments(optimizer.kind) * shape.largest_three_adjacent // shape.trained
        on_device = {"optimizer": moments_there, "master": 4 * shape.largest_three_adjacent}
        streamed = {part: min(resident[part], self._own(on_device[part])) for part in away}
        step = resident | {"gradients": self._held(4 * shape.trained)}
        if away or several:
            moments.append(step | streamed | self._exchanged())
        return max(map(self._with_overheads, moments), key=lambda parts: sum(parts.values()))

    def _rollout(self, sizes: StepSizes) -> dict[str, int]:
        """Bytes by part while the engine generates."""
        parts = self._resident(accumulates=False) | self._engine(sizes) | dict.fromkeys(self.offloaded, 0)
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
            "master": self._own(4 * shape.params_16bit) * (not optimizer.stochastic_rounding),
            "gradients": self._held(4 * shape.params_16bit + 4 * shape.params_32bit * accumulates),
            "optimizer": moments + steps,
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

        The head's weight and gradient stay from the loss to the end.
        """
        if not self.sharded:
            return {}
        shape = self.shape
        layers = 2 * shape.layer + (shape.itemsize + 4) * shape.layer_trained
        head = shape.itemsize * shape.vocabulary * shape.hidden * (1 + shape.head_trained)
        return {"gathered": layers + head}

    def _exchanged(self) -> dict[str, int]:
        """What an optimiser step of mode replicate adds: its rows of the summed gradients, and a bucket."""
        if self.sharded or self.device.ranks == 1:
            return {}
        return {"exchange": self._own(4 * self.shape.trained) + max(2 * BUCKET, 4 * self.shape.largest)}

    def _micro_batch(self, batch: MicroBatch, *, first: bool) -> dict[str, int]:
        """Transient bytes of a micro-batch, at the moment when their sum is largest.

        Args:
            first: gradients of float32 parameters are allocated during this backward, and stay.
        """
        shape, model, tokens = self.shape, self.run.model, batch.inputs
        recomputes = model.gradient_checkpointing not in (False, "auto") and model.gradient_checkpointing
        dense = "experts" not in shape.parameters
        fused = self.on_gpu and (model.liger_kernels is True or (dense and model.compile is not False))
        layers = shape.fused if fused else shape.plain
        attention = self._attention(batch)
        masks = sum(one.kept for one in attention[: 1 if recomputes in (True, "offload") else None])
        call = Workload(
            rows=batch.targets,
            vocabulary=shape.vocabulary,
            dtype=self.dtype,
            softcap=shape.softcap,
            extra_statistics=1,
            tolerance=model.head_tolerance,
            entropy_gradient=self.run.loss.needs_entropy,
            hidden_size=shape.hidden,
            trainable=shape.head_trained,
        )
        head = head_bytes(self.device, call, weight_grad=shape.head_trained)
        table = shape.vocabulary * shape.hidden
        of_hidden = shape.itemsize * shape.hidden * (tokens + batch.targets)
        # What a float32 parameter has of its gradient so far: the head's first, at the end all.
        head_grad = 4 * table * (first and shape.head_trained and shape.itemsize == 4)
        all_grads = 4 * shape.params_32bit * first
        embedding = shape.itemsize * table * shape.embedding_trained * (head_grad > 0 or not first)
        dequantized = shape.itemsize * shape.largest_quantized
        kept = layers.kept(recomputes, tokens)
        transient = max((one.transient for one in attention), default=0)
        # Gradients of queries that are wider than the hidden states, whose own are in place of what is freed.
        transient += shape.itemsize * tokens * max(0, shape.heads * shape.head_dim - shape.hidden)
        of_layer = layers.layer(recomputes, tokens, transient)
        of_layer += shape.itemsize * shape.layer_tensor + dequantized
        moments: list[dict[str, float]] = [
            {
                "activations": kept + shape.itemsize * shape.hidden * batch.targets,
                "gradients in flight": head_grad,
                "head": head.kept + max(head.forward, head.backward),
                "masks": masks,
            },
            {"activations": kept, "gradients in flight": head_grad + of_layer, "masks": masks},
            {"activations": of_hidden, "gradients in flight": all_grads + embedding},
        ]
        highest = max(moments, key=lambda moment: sum(moment.values()))
        if not self.on_gpu:  # its C library keeps what is freed: each part counts at its own highest
            own = {part: max(moment.get(part, 0.0) for moment in moments) for part in moments[0]}
            highest = highest | {"kept when freed": sum(own.values()) - sum(highest.values())}
        return {part: int(size * self.device.transient) for part, size in highest.items()}

    def _attention(self, batch: MicroBatch) -> list[PackedPrice]:
        """Of each layer, beyond its share of `LayersPrice`."""
        shape, text = self.shape, self.shapes.config.get_text_config()
        if self.own_attention:
            pairs = batch.documents * batch.sequence**2  # rows are computed together
            # As if every score were kept, and twice that in the backward: what SDPA computes takes less.
            return [PackedPrice(int(kept * pairs), int(2 * kept * pairs)) for kept in shape.plain.pairs]
        softcap = getattr(text, "attn_logit_softcapping", None) is not None
        limits = {"softcap": softcap, "sinks": has_sinks(self.shapes.config)}
        widths = [layer.numbers for layer in shape.layers]
        return [attention_price(self.attention, batch, shape, numbers, **limits) for numbers in widths]

    def _engine(self, sizes: StepSizes) -> dict[str, int]:
        price = self.engine_price(sizes)
        return {
            "engine weights": price.weights,
            "KV cache": price.kv_cache,
            "engine workspace": price.workspace,
            "engine residue": price.residue,
        }

    def _with_overheads(self, parts: dict[str, int]) -> dict[str, int]:
        """A phase's parts with what lies outside torch's allocator; parts of no bytes are left out."""
        if self.on_gpu:
            workspace = CUBLAS_WORKSPACE.get(self.device.capability[0], SMALL_CUBLAS_WORKSPACE)
            parts = parts | {"cuBLAS workspace": workspace, "CUDA context": self.device.context}
        else:
            parts = parts | {"libraries": self.device.context}
        parts = parts | {"fragmentation": int(FRAGMENTATION * transient_bytes(parts))}
        return {part: size for part, size in parts.items() if size}


def transient_bytes(parts: Mapping[str, int]) -> int:
    """Of a phase's allocated bytes, those that are freed again within it."""
    return sum(parts.get(part, 0) for part in _TRANSIENT)
