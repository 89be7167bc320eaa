"""The engine that samples with the trainer's model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.policy import Policy
from grpo_fast.policy.architecture import fix_rope
from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.policy.routing import recorded
from grpo_fast.rollout.agreement import evaluation_mode, require_agreement
from grpo_fast.rollout.batch import Batch, Pending, Report
from grpo_fast.rollout.decoder import decode, reads_prompts_once
from grpo_fast.rollout.generate import generate, takes_padding
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.sampling import uniforms_of
from grpo_fast.rollout.types import (
    Collector,
    Completion,
    PromptTokens,
    RolloutObserver,
    Sampling,
    check_prompts,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_fast.data.images import ImageReader, PromptImages

_REMEDY = "set rollout.engine to vllm, or model.path to another model"
CPU_BATCH_TOKENS = 40_000  # default on a CPU: 1.8 GB of SmolLM2-135M in float32


class TransformersEngine:
    """Batched generation with the transformers model that is being trained, without a copy of its weights.

    `decoder.py` samples from models with plain attention, `generate.py` from others and from prompts with
    images.
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_ids: Iterable[int],
        max_batch_tokens: int | None = None,
        image_reader: ImageReader | None = None,
        tells_experts: bool = False,
    ) -> None:
        """Wrap a model; nothing is allocated.

        Args:
            model: a causal model, or a peft model around one.
            tokenizer: of the model.
            eos_ids: the tokens that end a completion; ValueError if there are none.
            max_batch_tokens: limit of the KV cache; None: none on a GPU, `CPU_BATCH_TOKENS` on a CPU.
            image_reader: reads the images of prompts; None: images are refused.
            tells_experts: return the routed experts with completions.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_batch_tokens = max_batch_tokens
        self.tells_experts = tells_experts
        if not self.eos_ids:
            raise ValueError("eos_ids is empty: no completion would ever end; pass the tokenizer's end token")
        self._image_reader = image_reader
        inner: Any = model
        self._base: PreTrainedModel = inner.get_base_model() if hasattr(inner, "peft_config") else inner
        self._asleep = self._checked = False

    @cached_property  # transformers may not know the model's layers: `_require_ready` names the remedy
    def _reads_prompts_once(self) -> bool:
        return reads_prompts_once(self._base)

    @cached_property
    def _takes_padding(self) -> bool:
        return self._reads_prompts_once or takes_padding(self._base)

    def generate(
        self,
        prompts: PromptTokens,
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[list[Completion]]:
        """Generate as `Engine` specifies. The text includes the stop string that ended it."""
        self._require_ready()
        check_prompts(prompts, n)
        if images is not None and self._image_reader is None:
            raise ValueError("the prompts have images, but the engine has no image_reader; give it one")
        collector, uniforms = Collector(len(prompts), n, observer), uniforms_of(sampling, n * len(prompts))
        shown = images or [None] * len(prompts)
        pending: list[Pending] = []
        for index in sorted(range(len(prompts)), key=lambda index: _order(prompts[index])):
            self._require_room(prompts[index], sampling.max_completion_length)
            for number in range(n):
                done = partial(collector.add, index, number)
                row = Pending(tuple(prompts[index]), uniforms[:, len(pending)], done, shown[index])
                pending.append(row)
        self._sample(pending, sampling, collector.report)
        return collector.groups()

    def serve(self, requests: Requests) -> None:
        """Serve as `Engine` specifies, in batches that begin when all clients wait.

        So results do not depend on how long clients take.
        """
        with closing(requests):
            self._require_ready()
            while (taken := requests.take("all")) is not None:
                alike: dict[Sampling, list[Pending]] = defaultdict(list)
                for request in sorted(
                    taken, key=lambda one: (*_order(one.token_ids), one.sampling.seed or 0)
                ):
                    prompt, given = request.token_ids, request.sampling
                    try:
                        check_prompts([prompt], 1)
                        self._require_room(prompt, given.max_completion_length)
                    except ValueError as error:
                        requests.give(request, error)
                        continue
                    row = Pending(prompt, uniforms_of(given, 1)[:, 0], partial(requests.give, request))
                    alike[replace(given, max_completion_length=1, seed=None)].append(row)
                for sampling, pending in alike.items():
                    self._sample(pending, sampling, requests.report)

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def sync(self, policy: Policy) -> None:
        """Check that the policy is the engine's; there is nothing to copy."""
        if policy.model is not self.model:
            raise ValueError("sync() got another policy than the one this engine was made with")

    def freed(self) -> int:
        return 0  # the KV cache comes from torch's allocator

    def __enter__(self) -> TransformersEngine:
        """Raise ValueError for a model that cannot be sampled; a sleeping copy is checked later."""
        if not self._asleep:
            self._require_ready()
        return self

    def __exit__(self, *exc: object) -> None: ...

    def _require_ready(self) -> None:
        if self._asleep:
            raise RuntimeError("generate() on a sleeping engine; call wake() first")
        if self._checked:
            return
        self._checked = True  # for the call of `generate` below
        try:
            require_agreement(self._base, self.generate, _REMEDY, max_length=self.max_batch_tokens)
        except BaseException as error:
            self._checked = False
            refused = isinstance(error, FloatingPointError | ValueError) or is_out_of_memory(error)
            if refused or not isinstance(error, Exception):
                raise
            name = type(self._base).__name__
            raise ValueError(f"{name} cannot be sampled: {error!r}; {_REMEDY}") from error

    def _require_room(self, prompt: Sequence[int], max_new: int) -> None:
        largest = len(prompt) + max_new
        if self.max_batch_tokens is not None and largest > self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens = {self.max_batch_tokens} cannot hold one completion of up to {max_new} "
                f"tokens after a prompt of {len(prompt)}; raise it to at least {largest}"
            )

    def _sample(self, pending: Sequence[Pending], sampling: Sampling, report: Report) -> None:
        experts = recorded(self._base) if self.tells_experts else nullcontext()
        # Not inference_mode: training could not use a buffer that a forward replaces (dynamic RoPE).
        with evaluation_mode(self.model), torch.no_grad(), experts as take:
            for rows in self._batches(pending):
                shares = self._reads_prompts_once and not any(row.images for row in rows)
                batch = Batch(
                    *(rows, sampling, self.tokenizer, self.eos_ids, self._base.device),
                    shares_prompts=shares,
                    report=report,
                    take_experts=take,
                )
                if shares:
                    decode(self._base, batch)
                else:
                    generate(self._base, batch, self._image_reader)

    def _batches(self, pending: Sequence[Pending]) -> Iterator[list[Pending]]:
        """Split rows of ascending lengths into batches of at most `max_batch_tokens`."""
        budget = tokens_at_once(self.max_batch_tokens, self._base.device.type)
        max_new = max((len(row.uniforms) for row in pending), default=0)
        batch: list[Pending] = []
        for row in pending:
            needed = (len(batch) + 1) * (len(row.prompt) + max_new)
            uneven = batch and not self._takes_padding and len(row.prompt) != len(batch[0].prompt)
            if batch and (needed > budget or uneven):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


class OwnCopyEngine(TransformersEngine):
    """The engine of mode `shard`: generates with a whole copy of the sharded model, adapters merged.

    All ranks fill their copies in `sync` together, and free them in `sleep`.
    """

    def __init__(self, policy: Policy, *, max_length: int | None = None, **options: Any) -> None:
        """Make the copy, without weights; `options` are those of `TransformersEngine`."""
        like: Any = policy.base_model
        devices = [policy.device] if policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.device(policy.device):
            model = type(like)._from_config(copy.deepcopy(like.config), dtype=like.dtype)
        if max_length is not None:
            fix_rope(model, max_length)
        model.requires_grad_(False)
        super().__init__(model, policy.tokenizer, eos_ids=policy.eos_token_ids, **options)
        self._policy = policy
        self._weights = {n: t.detach() for n, t in Policy(model, policy.tokenizer).base_weights().items()}
        self.sleep()

    def sleep(self) -> None:
        super().sleep()
        for weight in self._weights.values():
            weight.untyped_storage().resize_(0)

    def sync(self, policy: Policy) -> None:
        if policy is not self._policy:
            raise ValueError("sync() got another policy than the one this engine was made with")
        for own in self._weights.values():  # before collectives, so that all ranks can retry
            own.untyped_storage().resize_(own.nbytes)
        for name, weight in policy.named_weights():
            self._weights[name].copy_(weight)

    def wake(self) -> None:
        if self.freed():
            raise RuntimeError("the engine has dropped its weights; sync() before wake()")
        super().wake()

    def freed(self) -> int:
        return sum(
            weight.nbytes for weight in self._weights.values() if not weight.untyped_storage().nbytes()
        )


def tokens_at_once(max_batch_tokens: int | None, device: str) -> float:
    """Return the limit of the KV cache in tokens, by default that of the device."""
    if max_batch_tokens is not None:
        return max_batch_tokens
    return CPU_BATCH_TOKENS if device == "cpu" else inf


def _order(prompt: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Sort prompts by length, equal ones adjacent."""
    return len(prompt), tuple(prompt)
