"""What a prediction follows from: a model, a device, who shares it, and the sizes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import GIB, DeviceBudget
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.load import resolve_attention
from grpo_fast.policy.packing import _sharing_pays
from grpo_fast.rollout.config import Part
from grpo_fast.rollout.handover import PARTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Bytes of a packed batch: token, position and segment of every input; of every target its index, id, sequence
# and group, its advantage, sampler's, old and reference log-probability.
BYTES_PER_INPUT, BYTES_PER_TARGET = 3 * 8, 4 * 8 + 4 * 4


@dataclass(frozen=True)
class StepSizes:
    """The sizes of one training step, each at its largest."""

    prompts: int  # prompts_per_step
    generations: int  # completions of each
    prompt_length: int  # tokens
    completion_length: int
    micro_batch_tokens: int
    minibatches: int = 1

    @property
    def completions(self) -> int:
        return self.prompts * self.generations

    @property
    def sequence_length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def groups(self) -> int:
        """Of one optimiser step."""
        return -(-self.prompts // self.minibatches)

    @property
    def packed_bytes(self) -> int:
        """Of all packed batches, which are on the device together; prompts count each time."""
        per_completion = BYTES_PER_INPUT * self.sequence_length + BYTES_PER_TARGET * self.completion_length
        return self.completions * per_completion


@dataclass(frozen=True)
class Setup:
    """Who is on the device, and what leaves it when."""

    config: PretrainedConfig
    model: ModelConfig
    device: DeviceBudget
    attention: str  # as `resolve_attention` gives it
    engine: Literal["transformers", "vllm"]
    shares_weights: bool  # the engine generates with the trainer's own
    sleeps: bool  # the engine gives its memory up during the update
    offload: tuple[Part, ...] | Literal["auto"]  # of the trainer, during the rollout
    needs_reference: bool = False
    entropy_trained: bool = False  # the loss has a term of the entropy
    max_batch_tokens: int | None = None  # of the transformers engine
    kv_cache_bytes: int | None = None  # as configured
    max_sequences: int | None = None  # of vLLM

    @property
    def shares_prompts(self) -> bool:
        """As `Policy.shares_prompts`."""
        return self.attention != "flash_attention_2"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.model.dtype)


def setup_of(config: TrainConfig, model_config: PretrainedConfig, device: DeviceBudget) -> Setup:
    """The setup of a run on a device, which need not be this machine's."""
    model, vllm, loss, on_gpu = config.model, config.rollout.vllm, config.loss, device.kind == "cuda"
    engine = config.rollout.engine
    if engine == "auto":  # a plan for another machine does not ask what is installed on this one
        engine = "vllm" if on_gpu else "transformers"
    attention: str = model.attention
    if attention == "auto":
        attention = resolve_attention("auto", torch.device(device.kind), model.dtype)
    merged_lora = model.lora is not None and vllm.lora_sync != "adapter"
    wanted = on_gpu if vllm.share_weights == "auto" else vllm.share_weights
    offload = config.memory.offload
    return Setup(
        config=model_config,
        model=model,
        device=device,
        attention=attention,
        engine=engine,
        shares_weights=engine == "transformers"
        or bool(wanted and vllm.tensor_parallel_size == 1 and not merged_lora),
        sleeps=engine == "vllm" and on_gpu and vllm.sleep_level != 0,
        offload=offload if offload == "auto" else tuple(p for p in PARTS if p in offload and on_gpu),
        needs_reference=loss.needs_reference and model.lora is None,
        entropy_trained=loss.needs_entropy,
        max_batch_tokens=config.rollout.max_batch_tokens,
        kv_cache_bytes=None if vllm.kv_cache_gib is None else int(vllm.kv_cache_gib * GIB),
        max_sequences=vllm.max_sequences,
    )


def step_sizes(config: TrainConfig, *, prompt_length: int | None = None) -> StepSizes:
    """The sizes of a run's steps; a group of two where `num_generations` is not known yet.

    Raises:
        ValueError: nothing says how long prompts may be, or the algorithm has no rollouts.
    """
    if config.algorithm != "grpo":
        raise ValueError(f"algorithm = {config.algorithm!r} has no rollouts; only grpo can be planned")
    prompt_length = prompt_length or config.dataset.max_prompt_length
    if prompt_length is None:
        raise ValueError(
            "the longest prompt is not known: set dataset.max_prompt_length (or --prompt-length of "
            "`grpo-fast plan`)"
        )
    generations = config.rollout.num_generations
    return StepSizes(
        prompts=config.prompts_per_step,
        generations=2 if generations == "auto" else generations,
        prompt_length=prompt_length,
        completion_length=config.rollout.length_limit,
        micro_batch_tokens=config.micro_batch_tokens,
        minibatches=config.minibatches,
    )


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of an optimiser step, in the sizes that bytes follow from."""

    inputs: int
    targets: int
    squares: int  # Σ of the documents' squared lengths
    longest: int  # tokens of its longest document
    groups: float  # that it holds
    count: int  # micro-batches of an optimiser step


def largest_micro_batch(sizes: StepSizes, *, share_prompts: bool) -> MicroBatch:
    """As even as `pack` makes them, all completions as long as they may be."""
    budget = sizes.micro_batch_tokens
    documents = sorted(_group(sizes, budget, share_prompts) * sizes.groups, reverse=True)
    fewest = -(-sum(inputs for inputs, _ in documents) // budget)
    for count in range(fewest, len(documents)):
        if sum(inputs for inputs, _ in documents[::count]) <= budget:
            return _micro_batch(documents[::count], sizes, count)
    return _micro_batch(documents[:1], sizes, len(documents))


def undivided_group(sizes: StepSizes, *, share_prompts: bool) -> MicroBatch:
    """One group, whatever the budget for a micro-batch."""
    budget = sizes.generations * sizes.sequence_length
    return _micro_batch(_group(sizes, budget, share_prompts), sizes, sizes.groups)


def _group(sizes: StepSizes, budget: int, share_prompts: bool) -> list[tuple[int, int]]:
    """(inputs, targets) of the documents that `pack` makes of one group."""
    completion = sizes.completion_length - 1  # the last token is a target only
    alone = length = sizes.prompt_length + completion
    held = 1
    while (
        share_prompts
        and held < sizes.generations
        and length + completion <= budget
        and _sharing_pays(length, sizes.prompt_length, completion)
    ):
        held, length = held + 1, length + completion
    full, rest = divmod(sizes.generations, held)
    documents = [(length, held * sizes.completion_length)] * full
    if rest:
        documents.append((alone + (rest - 1) * completion, rest * sizes.completion_length))
    return documents


def _micro_batch(documents: Sequence[tuple[int, int]], sizes: StepSizes, count: int) -> MicroBatch:
    targets = sum(found for _, found in documents)
    return MicroBatch(
        inputs=sum(inputs for inputs, _ in documents),
        targets=targets,
        squares=sum(inputs**2 for inputs, _ in documents),
        longest=max(inputs for inputs, _ in documents),
        groups=targets / (sizes.generations * sizes.completion_length),
        count=count,
    )
