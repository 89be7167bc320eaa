"""The formula for the bytes of a training step on one rank, by phase and part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from grpo_fast.config.rollout import Part
from grpo_fast.config.schema import TrainConfig
from grpo_fast.head.plan import Workload, plan_head
from grpo_fast.kernels import TILE
from grpo_fast.plan.devices import CUDA_CONTEXT, GIB, DeviceBudget
from grpo_fast.plan.model_shape import ADAM_BYTES, ModelShape
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy.host_memory import ARENA
from grpo_fast.policy.layers import TILE_TOKENS
from grpo_fast.rollout.engines import EngineKind, Trained, Weights, engine_kind
from grpo_fast.rollout.handover import PARTS
from grpo_fast.rollout.transformers import tokens_at_once
from grpo_fast.rollout.vllm.settings import kv_cache_gib

Phase = Literal["update", "rollout"]
PHASES: tuple[Phase, ...] = ("update", "rollout")
Parts = dict[Phase, dict[str, int]]

IN_FLIGHT = 0.25  # bytes that a layer's backward allocates, in multiples of what the layer keeps
CPU_LIBRARIES = 50 << 20  # buffers and code of torch's libraries; measured with torch 2.13
ENGINE_RESIDUE = int(0.4 * GIB)  # of a sleeping engine; measured on an H200 with vLLM 0.26, Qwen2.5-1.5B
FRAGMENTATION = 0.05  # of what a phase allocates and frees again
PAGE_TOKENS = 16  # of a page of vLLM's KV cache
PREFILL_TOKENS = 16_384  # of one forward of vLLM on a large GPU
LOGIT_COPIES = 4  # of the next token's float32 logits, while sampling
_TRANSIENT = ("activations", "layer in flight", "head", "embedding's gradient", "engine workspace")


@dataclass(frozen=True)
class Setup:
    """A run, its model and the device of each rank; `auto` means no offload and no recomputation."""

    config: TrainConfig
    shape: ModelShape
    device: DeviceBudget

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    @property
    def sharded(self) -> bool:
        return self.device.ranks > 1 and self.config.distributed.mode == "shard"

    @cached_property
    def engine(self) -> EngineKind:
        """Return the rollout engine; `auto` does not depend on what is installed here."""
        name = self.config.rollout.engine
        return engine_kind(("vllm" if self.on_gpu else "transformers") if name == "auto" else name)

    @cached_property
    def weights(self) -> Weights:
        """Return how the engine gets its weights."""
        adapted, quantized = self.config.model.lora is not None, self.shape.quantized > 0
        trained = Trained(adapted, quantized, self.sharded, self.shape.experts)
        return self.engine.weights(self.config.rollout, trained)

    @property
    def sleeps(self) -> bool:
        return self.engine.sleeps(self.config.rollout, self.on_gpu)

    @cached_property
    def offloadable(self) -> tuple[Part, ...]:
        """Return the parts that can be offloaded, by cost; mode shard keeps the reference."""
        resident = resident_bytes(self)
        stays = "reference" if self.sharded else None
        return tuple(part for part in PARTS if self.on_gpu and resident[part] and part != stays)

    @property
    def offloaded(self) -> tuple[Part, ...]:
        named = self.config.memory.offload
        named = [] if isinstance(named, str) else named
        if self.config.optimizer.kind == "adamw_offload":
            named = [*named, "optimizer", "master"]
        return tuple(part for part in self.offloadable if part in named)


def step_bytes(setup: Setup, sizes: StepSizes) -> Parts:
    """Return the peak bytes of a rank's device by phase and part."""
    sizes = replace(sizes, shares_prompts=setup.shape.packs)
    engine = engine_bytes(setup, sizes)
    rollout = resident_bytes(setup) | engine | dict.fromkeys(setup.offloaded, 0)
    return {"update": _update(setup, sizes, engine), "rollout": _with_overheads(setup, rollout)}


def host_bytes(setup: Setup, sizes: StepSizes) -> int:
    """Return the host's bytes for offloaded parts and layer inputs."""
    size = parts_bytes(setup, setup.offloaded)
    if setup.config.model.recomputed == "offload":
        shape = setup.shape
        inputs = shape.itemsize * shape.hidden * sizes.micro_batch.inputs
        size += len(shape.layers) * (1 << (inputs - 1).bit_length())  # torch pins powers of two
    return size


def parts_bytes(setup: Setup, parts: Sequence[Part]) -> int:
    """Return the host's bytes for these parts; gradients are freed, not moved."""
    resident = resident_bytes(setup)
    moved = [resident[part] for part in parts if part != "gradients"]
    return sum(moved) + ARENA * bool(moved)


def resident_bytes(setup: Setup) -> dict[str, int]:
    """Return the bytes of the trainer's tensors that outlive an update.

    Masters and moments are sharded over ranks; in mode shard, everything is.
    """
    config, shape, ranks = setup.config, setup.shape, setup.device.ranks
    of_weights = ranks if setup.sharded else 1
    reference = shape.reference or shape.bytes * (config.model.lora is None)
    return {
        "weights": shape.bytes // of_weights,
        "master": shape.master_bytes * (not config.optimizer.stochastic_rounding) // ranks,
        "gradients": shape.master_bytes // of_weights,
        "optimizer": int(ADAM_BYTES[config.optimizer.kind] * shape.trained) // ranks,
        "reference": reference * config.keeps_reference // of_weights,
    }


def _update(setup: Setup, sizes: StepSizes, engine: Mapping[str, int]) -> dict[str, int]:
    shape, ranks = setup.shape, setup.device.ranks
    gradients = 4 * shape.trained // (ranks if setup.sharded else 1)
    held = resident_bytes(setup) | {"packed batches": sizes.packed_bytes, "gradients": gradients}
    if setup.sleeps:
        held["engine residue"] = engine["engine residue"]
    elif not setup.engine.draws_with_policy:
        held |= {part: size for part, size in engine.items() if part != "engine workspace"}
    away = {part: 0 for part in setup.offloaded if part in ("optimizer", "master")}
    backward = held | away | _micro_batch(setup, sizes)
    # Offloaded state visits the device: of one tensor, while the last one leaves and the next one arrives.
    visiting = {"optimizer": 8 * shape.largest_three, "master": 4 * shape.largest_three}
    step = held | {part: min(held[part], visiting[part] // ranks) for part in away}
    if ranks > 1 and not setup.sharded:  # rows of the summed gradients, and a padded tensor
        step["exchange"] = 4 * shape.trained // ranks + 4 * shape.largest_three
    return max(_with_overheads(setup, backward), _with_overheads(setup, step), key=lambda p: sum(p.values()))


def _micro_batch(setup: Setup, sizes: StepSizes) -> dict[str, int]:
    """Return the transient parts of a forward and backward at their peak."""
    config, shape, batch = setup.config, setup.shape, sizes.micro_batch
    tokens, value, full = batch.inputs, shape.itemsize, not shape.adapters
    recomputed = config.model.recomputed
    liger, compiled = config.model.liger_kernels is True, config.model.compile is not False
    fused = setup.on_gpu and (liger or (compiled and not shape.experts))
    tile = min(tokens, TILE_TOKENS) if shape.tiled and recomputed else tokens
    scores = 4 * shape.scoring_heads * batch.completions * sizes.sequence_length**2
    keys = max((width for width, _ in shape.cache), default=0)
    attention = scores + value * keys * batch.repeated  # of one layer
    of_token = [shape.kept(layer, fused=fused) for layer in shape.layers]
    mixers = sum(mixer for mixer, _ in of_token) * tokens + attention * len(of_token)
    mlps = sum(mlp for _, mlp in of_token) * tokens + sum(shape.merged)
    inputs = value * shape.hidden * tokens  # of one layer
    kept: float = tokens * shape.hidden * (4 + 2 * value)  # the embedding's result, the final norm
    if recomputed is None:
        kept += mixers + mlps
    elif recomputed == "mlp":
        kept += mixers + inputs * len(of_token)
    else:
        kept += inputs * (1 if recomputed == "offload" else len(of_token))
    mixer, mlp = max(of_token, key=sum)
    mixer, mlp = mixer * tokens + attention, mlp * tile
    again = 0.0 if recomputed is None else mlp if recomputed == "mlp" else mixer + mlp
    flight = again + IN_FLIGHT * (mixer + mlp + shape.layer_bytes * full)
    flight += 2 * value * shape.queries * batch.repeated + value * shape.quantized
    flight += 2 * max(shape.merged, default=0)
    table = value * shape.vocabulary * shape.hidden
    gathered = 0
    if setup.sharded:  # FSDP2 has two layers, the gradients of one in two dtypes, and the head
        gathered = 2 * shape.layer_bytes + table * (1 + shape.head_trained)
        gathered += shape.layer_bytes * (1 + 4 // value) * full
    moments: list[dict[str, float]] = [
        {"activations": kept, "head": head_bytes(setup, batch.targets)},
        {"activations": kept, "layer in flight": flight},
        {"embedding's gradient": table * full},
    ]
    highest = max(moments, key=lambda moment: sum(moment.values()))
    return {part: int(size) for part, size in highest.items()} | {"gathered": gathered}


def head_bytes(setup: Setup, targets: int) -> int:
    """Return the bytes of the head's loss and gradient, besides weight and hidden states."""
    shape, model = setup.shape, setup.config.model
    work = Workload(
        rows=targets,
        vocabulary=shape.vocabulary,
        dtype={2: torch.bfloat16, 4: torch.float32}[shape.itemsize],
        extra_statistics=1,
        tolerance=model.head_tolerance,
        hidden_size=shape.hidden,
        trainable=shape.head_trained,
        jacobian=not shape.head_trained and not setup.config.loss.needs_entropy,
    )
    kernels = setup.device.has_triton and model.head != "reference"
    plan = plan_head(replace(setup.device, has_triton=kernels), work)
    # Hidden states, also of the reference; their gradient in float32; a few numbers per row.
    states = shape.itemsize * (1 + setup.config.loss.compares_heads) + 4
    rows = targets * (shape.hidden * states + 60)
    if plan.backend == "reference":
        height, columns = min(plan.chunks.rows, targets), min(plan.chunks.columns, shape.vocabulary)
        return rows + 4 * (3 * height * columns + (height + columns) * shape.hidden)
    tiles = -(-shape.vocabulary // TILE)
    statistics = 2 * 4 * targets * tiles
    columns = min(plan.dense_columns, shape.vocabulary)
    chunk = targets * columns * shape.itemsize + 4 * columns * shape.hidden * shape.head_trained
    if plan.jacobian:
        chunk = min(plan.jacobian_rows, targets) * shape.vocabulary * shape.itemsize
    elif plan.backward == "sparse":
        pairs = plan.sparse.most_pairs(targets, tiles)
        chunk = max(chunk, plan.sparse.workspace_bytes(pairs, targets, tiles, shape.itemsize))
    return rows + statistics + chunk


def engine_bytes(setup: Setup, sizes: StepSizes) -> dict[str, int]:
    """Return the bytes of an engine that samples with the trainer's model, or else of one like vLLM."""
    shape, config, weights = setup.shape, setup.config.rollout, setup.weights
    base = shape.itemsize * (shape.parameters - shape.adapters)
    own = base * (not weights.shared) + shape.itemsize * shape.adapters * weights.adapters
    layer = shape.itemsize * max(layer.mlp + 2 * shape.hidden for layer in shape.layers)
    vocabulary = 4 * LOGIT_COPIES * shape.vocabulary
    prompt, in_flight = sizes.prompt_length, sizes.in_flight
    # Each turn has the turns before in its prompt.
    prompt = sizes.sequence_length if config.has_turns else prompt
    if setup.engine.draws_with_policy:
        length = prompt + sizes.completion_length
        budget = tokens_at_once(config.max_batch_tokens, setup.device.kind)
        rows = int(max(1, min(sizes.completions, budget // length)))
        cache = rows * shape.kv_bytes(length) * (1 + 1 / max(1, len(shape.cache)))  # one layer is copied
        return {
            "engine weights": own,
            "KV cache": int(cache),
            "engine workspace": int(max(rows * prompt * layer, rows * vocabulary)),
            "engine residue": 0,
        }
    shared = min(sizes.prompts, in_flight) * sizes.prompt_length
    completion = sizes.completion_length * sizes.expected // 100
    longest = max(sizes.longest, sizes.sequence_length) + 2 * PAGE_TOKENS  # vLLM never fills one page
    held = max(shared + in_flight * (completion + PAGE_TOKENS), longest)
    page = shape.itemsize * sum(width for width, _ in shape.cache)  # of layers with a window, too
    size = kv_cache_gib(config.vllm, setup.on_gpu)
    return {
        "engine weights": own,
        "KV cache": held * page if size is None else int(size * GIB),
        "engine workspace": int(min(PREFILL_TOKENS, sizes.prompts * prompt) * layer + in_flight * vocabulary),
        "engine residue": ENGINE_RESIDUE,
    }


def _with_overheads(setup: Setup, parts: Mapping[str, int]) -> dict[str, int]:
    """Add the bytes outside torch's allocator, and drop empty parts."""
    transient = sum(parts.get(part, 0) for part in _TRANSIENT)
    context = CUDA_CONTEXT if setup.on_gpu else CPU_LIBRARIES
    parts = {**parts, "context": context, "fragmentation": int(FRAGMENTATION * transient)}
    return {part: size for part, size in parts.items() if size}
