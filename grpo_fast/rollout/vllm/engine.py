"""The engine that generates with vLLM, in the trainer's process and on the trainer's device.

It starts with the policy's weights from memory and compares what it computes with the policy before anything
depends on it. While the trainer works it sleeps; afterwards it takes over the weights, forgets what it had
cached, and goes on.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.rollout.collector import Collector
from grpo_fast.rollout.sampling import check
from grpo_fast.rollout.types import Completion, RolloutObserver, Sampling
from grpo_fast.rollout.vllm.checks import (
    agree,
    loose_tensors,
    policy_logprobs,
    probe_tokens,
    require_same_tokenizer,
)
from grpo_fast.rollout.vllm.choices import shares_weights, sleep_level, uses_adapters
from grpo_fast.rollout.vllm.config import VLLMConfig
from grpo_fast.rollout.vllm.layout import storage_of
from grpo_fast.rollout.vllm.memory import require_room
from grpo_fast.rollout.vllm.process import stopped
from grpo_fast.rollout.vllm.requests import (
    Requests,
    base_seed,
    completion_of,
    request_seed,
    sampling_parameters,
)
from grpo_fast.rollout.vllm.sleep import Phase, SleepCycle
from grpo_fast.rollout.vllm.start import Started, start
from grpo_fast.rollout.vllm.sync import AdapterSync, MergedSync, Sync, fingerprint

if TYPE_CHECKING:
    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)
NOT_SHARED = (
    "vLLM's weights are a copy that stays on the device, for %s; rollout.vllm.share_weights = false lets it "
    "leave while the trainer works"
)
GREEDY_PROBE = Sampling(max_completion_length=1, temperature=0.0)


class VLLMEngine:
    """vLLM beside the trainer. One at a time in a process; close it, or use it as a context manager.

    Attributes:
        sync_way: how weights get there: shared, direct, portable or adapter.
        sync_reason: why in this way.
    """

    name = "vllm"

    def __init__(
        self,
        policy: Policy,
        config: VLLMConfig | None = None,
        *,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
    ) -> None:
        """
        Args:
            policy: whose weights generate; the engine keeps it.
            config: the run's `rollout.vllm`.
            max_length: tokens of the longest prompt and its completion; none: as the configuration says.
            kv_cache_bytes: planned for keys and values, where the configuration does not say.

        Raises:
            ImportError: vLLM is missing or of an unknown version.
            RuntimeError: a vLLM engine is running in this process.
            ValueError: a setting that this device or policy cannot have, or a model that vLLM computes
                differently from the policy.
        """
        config = config or VLLMConfig()
        self._policy = policy
        self._eos_ids = policy.eos_token_ids
        self._same_tokenizer = False  # not yet looked at
        self._in_parallel = config.tensor_parallel_size > 1
        adapters = uses_adapters(policy, config)
        level, shares = sleep_level(policy, config, adapters), shares_weights(policy, config, adapters)
        self._started: Started | None = start(
            policy,
            config,
            max_length=max_length,
            kv_cache_bytes=kv_cache_bytes,
            adapters=adapters,
            sleeps=policy.device.type == "cuda" and level != 0,
            shares=shares,
        )
        try:
            self._cycle = SleepCycle(self._vllm, 0, require_room)
            self._sync: Sync | None = (
                AdapterSync(self._vllm)
                if adapters
                else MergedSync(self._vllm, self._started.model, policy, self._started.landings)
            )
            self._started.landings = []  # of a weight that vLLM repacked they would keep the memory
            self.sync_way, self.sync_reason = self._sync.way, self._sync.reason
            if config.share_weights is True and self.sync_way not in ("shared", "adapter"):
                raise ValueError(f"rollout.vllm.share_weights = true: {self.sync_reason}; set it to auto")
            if shares and self.sync_way not in ("shared", "adapter"):
                logger.warning(NOT_SHARED, self.sync_reason)
            if level == "auto":
                level = 1 if self.sync_way in ("shared", "adapter") else 2
            self._cycle.level = level
            self.sync(policy)
            self._compare_with_policy()
            if level == 2:
                self._rehearse()
        except BaseException:
            self.close()
            raise

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return int(self._vllm.model_config.max_model_len)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """`n` completions for each tokenised prompt, in the order of the prompts.

        All are in flight at once, and those of a prompt share its KV cache. Each has a seed of its own, made
        of `sampling.seed`, its prompt's number and its own: the same call gives the same tokens, up to the
        rounding that other batches bring. The global random state is left alone. Whatever ends the call
        early, nothing stays behind in vLLM.

        Raises:
            RuntimeError: the engine sleeps, or is closed.
            ValueError: an empty prompt, `n` below 1, a value of `sampling` outside its range, or a prompt
                that leaves no room for its completion.
            FloatingPointError: the model's logits hold NaN.
        """
        self._running()
        self._cycle.require_awake()
        check(sampling)
        if sampling.seed is None and self._in_parallel:
            raise ValueError("sampling.seed = None: tensor-parallel processes must draw alike; give a seed")
        if n < 1:
            raise ValueError(f"n = {n} must be at least 1")
        for index, prompt in enumerate(prompts):
            self._check_prompt(index, prompt, sampling.max_completion_length)
        if sampling.stop and not self._same_tokenizer:
            require_same_tokenizer(self._policy.tokenizer, self._vllm.get_tokenizer())
            self._same_tokenizer = True
        if fingerprint(self._policy) != self._synced:
            self.sync(self._policy)
        collector = Collector(len(prompts), n, observer)
        params, seed = sampling_parameters(sampling, self._eos_ids), base_seed(sampling)
        with self._requests() as requests:
            for index, prompt in enumerate(prompts):
                for number in range(n):
                    own = copy.copy(params)
                    own.seed = request_seed(seed, index, number)
                    requests.add(prompt, (index, number), own, self._sync.adapter)
            for finished in requests.finished():
                for (index, number), output in finished:
                    completion = completion_of(output.outputs[0], self._policy.tokenizer)
                    collector.add(index, number, completion)
                if collector.report_due:
                    collector.report(requests.tokens())
        return collector.groups()

    def sleep(self) -> None:
        """Give the memory away; does nothing when asleep."""
        self._running()
        self._cycle.sleep()

    def sync(self, policy: Policy) -> None:
        """Take over the policy's weights, asleep or awake, and forget everything computed with older ones.

        Asleep, memory is taken for the weights alone, so that the trainer can leave before the KV cache
        comes back.

        Raises:
            ValueError: another policy than the engine was made with.
            RuntimeError: no memory for the weights, or cached keys and values that cannot be dropped.
        """
        if policy is not self._policy:
            raise ValueError("sync() got another policy than the one this engine was made with")
        self._running()
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)  # the optimiser's last kernels may still be writing
        self._cycle.wake_weights()
        self._sync(policy, everything=self._cycle.weights_dropped)
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)
        self._cycle.weights_loaded()
        if not self._vllm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps cached keys and values of older weights: requests are in flight")
        self._synced = fingerprint(policy)

    def wake(self) -> None:
        """Be ready to generate; does nothing when awake.

        Raises:
            RuntimeError: the weights were dropped and not synced since, or there is no memory to wake in.
        """
        self._running()
        self._cycle.wake()

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights besides the policy's own, and the KV cache."""
        started = self._running()
        asleep = self._cycle.phase is Phase.ASLEEP and self._cycle.level > 0
        no_cache = self._cycle.phase is not Phase.AWAKE and self._cycle.level > 0
        caches = {storage_of(t): t.untyped_storage().nbytes() for t in self._kv_tensors()}
        return {
            "weights": 0 if asleep and started.weights_sleep else started.weight_bytes,
            "kv_cache": 0 if no_cache else sum(caches.values()),
        }

    def close(self) -> None:
        """Stop vLLM and free what it holds. The policy stays as it is, shared weights included.

        vLLM takes torch.distributed down as it goes, also where it was there before.
        """
        if self._started is None:
            return
        vllm = self._vllm
        with suppress(RuntimeError):  # no room: what sleeps, vLLM cannot free; it goes with the process
            self._cycle.weights_loaded()
            self._cycle.wake()
        self._started = self._sync = self._cycle.engine = None  # what refers to its memory keeps it
        try:
            vllm.engine_core.shutdown()
        except Exception as error:  # a run that is over does not fail by it
            logger.warning("vLLM did not stop cleanly: %s", error)
        finally:
            stopped()
            del vllm
            gc.collect()
            if self._policy.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> VLLMEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _vllm(self) -> Any:
        return self._running().engine

    def _running(self) -> Started:
        if self._started is None:
            raise RuntimeError("the vLLM engine is closed")
        return self._started

    def _requests(self) -> Requests:
        return Requests(self._vllm, self._policy.device)

    def _check_prompt(self, index: int, prompt: Sequence[int], max_new: int) -> None:
        if not len(prompt):
            raise ValueError(f"prompts[{index}] has no tokens; a prompt needs at least one")
        if len(prompt) + max_new > self.max_length:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens, and with up to {max_new} more exceeds the "
                f"{self.max_length} that vLLM was started for; raise rollout.vllm.max_model_length or "
                "kv_cache_gib, or lower dataset.max_prompt_length or rollout.max_completion_length"
            )

    def _kv_tensors(self) -> Iterator[Tensor]:
        for cache in self._running().worker.model_runner.kv_caches:
            yield from (cache if isinstance(cache, (list, tuple)) else (cache,))

    def _probe(self) -> Tensor:
        """(T - 1,) log-probabilities of a fixed text."""
        params = sampling_parameters(GREEDY_PROBE, self._eos_ids)
        params.prompt_logprobs, params.flat_logprobs = 0, False
        tokens = self._probe_tokens()
        with self._requests() as requests:
            requests.add(tokens, (0, 0), params, self._sync.adapter)
            ((_, output),) = [item for step in requests.finished() for item in step]
        pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([logprobs[token].logprob for token, logprobs in pairs])

    def _probe_tokens(self) -> list[int]:
        tokens = probe_tokens(self._policy.base_model.config.get_text_config().vocab_size)
        return tokens[: self.max_length - 1]

    def _compare_with_policy(self) -> None:
        """
        Raises:
            ValueError: vLLM computes something else.
        """
        policy = self._policy
        expected = policy_logprobs(policy, self._probe_tokens())
        if not agree(self._probe(), expected, policy.base_model.dtype):
            raise ValueError(
                f"vLLM computes other log-probabilities for {type(policy.base_model).__name__} than the "
                "policy does; its implementation of the model differs, or its reload of the weights is not "
                "exact: set rollout.engine to transformers"
            )

    def _rehearse(self) -> None:
        """Sleep and wake once at level 2; where something does not survive it, repair it and use level 1."""
        kv = {storage_of(tensor) for tensor in self._kv_tensors()}
        loose = loose_tensors(self._running().model, without=kv)
        kept = [tensor.detach().to("cpu", copy=True) for tensor in loose]
        before = self._probe()
        self.sleep()
        self.sync(self._policy)
        self.wake()
        if agree(before, self._probe(), self._policy.base_model.dtype):
            return
        with torch.inference_mode():  # in which vLLM may have made them
            for tensor, value in zip(loose, kept, strict=True):
                tensor.copy_(value)
        self._cycle.level = 1
        self._compare_with_policy()
        warnings.warn(
            f"{type(self._policy.base_model).__name__} does not survive vLLM's sleep level 2: something of "
            "it lies outside parameters and buffers; level 1 is used, and takes host memory for the weights",
            stacklevel=3,
        )
