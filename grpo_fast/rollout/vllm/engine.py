"""The engine that generates with vLLM, in the trainer's process and on the trainer's device.

It starts with the policy's weights from memory and compares what it computes with the policy before anything
depends on it. While the trainer works it sleeps; afterwards it takes over the weights, forgets what it had
cached, and goes on.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import logging
import secrets
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.rollout.config import VLLMConfig
from grpo_fast.rollout.types import Collector, Completion, RolloutObserver, Sampling, check_prompts
from grpo_fast.rollout.vllm.checks import (
    agree,
    probe_tokens,
    require_agreement,
    require_same_tokenizer,
    unregistered_tensors,
)
from grpo_fast.rollout.vllm.sleep import Phase, SleepCycle, require_room
from grpo_fast.rollout.vllm.start import (
    Started,
    shares_weights,
    sleep_level,
    start,
    stopped,
    uses_adapters,
)
from grpo_fast.rollout.vllm.weights import (
    AdapterSync,
    MergedSync,
    fingerprint,
    size_in_bytes,
    storage_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)
NOT_SHARED = (
    "vLLM's weights are a copy that stays on the device, for %s; rollout.vllm.share_weights = false lets it "
    "be freed while the trainer works"
)
GREEDY_PROBE = Sampling(max_completion_length=1, temperature=0.0)
_calls = itertools.count()


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
            self._sync: MergedSync | AdapterSync = (
                AdapterSync(self._vllm)
                if adapters
                else MergedSync(self._vllm, self._started.model, policy, self._started.placements)
            )
            self._started.placements = []  # of a weight that vLLM repacked they would keep the memory
            self.sync_way, self.sync_reason = self._sync.way, self._sync.reason
            shared = self.sync_way in ("shared", "adapter")
            if config.share_weights is True and not shared:
                raise ValueError(f"rollout.vllm.share_weights = true: {self.sync_reason}; set it to auto")
            if shares and not shared:
                logger.warning(NOT_SHARED, self.sync_reason)
            if level == "auto":
                level = 1 if shared else 2
            self._cycle.level = level
            self.sync(policy)
            require_agreement(policy, self._probe_tokens(), self._probe())
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
            ValueError: an empty prompt, `n` below 1, or a prompt that leaves no room for its completion.
            FloatingPointError: the model's logits hold NaN.
        """
        vllm, tokenizer = self._vllm, self._policy.tokenizer
        self._cycle.require_awake()
        check_prompts(prompts, n)
        if sampling.seed is None and self._in_parallel:
            raise ValueError("sampling.seed = None: tensor-parallel processes must draw alike; give a seed")
        for index, prompt in enumerate(prompts):
            self._check_length(index, len(prompt), sampling.max_completion_length)
        if sampling.stop:
            require_same_tokenizer(tokenizer, vllm.get_tokenizer())
        if fingerprint(self._policy) != self._synced:
            self.sync(self._policy)
        collector = Collector(len(prompts), n, observer)
        params = sampling_parameters(sampling, self._policy.eos_token_ids)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        with self._requests() as requests:
            for index, prompt in enumerate(prompts):
                for number in range(n):
                    own = copy.copy(params)
                    own.seed = request_seed(seed, index, number)
                    requests.add(prompt, (index, number), own)
            for finished in requests.finished():
                for (index, number), output in finished:
                    collector.add(index, number, completion_of(output.outputs[0], tokenizer))
                if collector.report_due:
                    collector.report(requests.tokens())
        return collector.groups()

    def sleep(self) -> None:
        """Free the memory; does nothing when asleep."""
        self._running()
        self._cycle.sleep()

    def sync(self, policy: Policy) -> None:
        """Take over the policy's weights, asleep or awake, and forget everything computed with older ones.

        Asleep, memory is taken for the weights alone, so that the trainer's can be freed before the KV cache
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
        started, phase = self._running(), self._cycle.phase
        if self._cycle.level == 0:
            phase = Phase.AWAKE  # a pause frees nothing
        weights_freed = phase is Phase.ASLEEP and started.weights_sleep
        return {
            "weights": 0 if weights_freed else started.weight_bytes,
            "kv_cache": size_in_bytes(self._kv_tensors()) if phase is Phase.AWAKE else 0,
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
        self._started = None
        for name in ("_sync", "_cycle"):
            vars(self).pop(name, None)  # what refers to vLLM's memory keeps it
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
    def _vllm(self) -> LLMEngine:
        return self._running().engine

    def _running(self) -> Started:
        if self._started is None:
            raise RuntimeError("the vLLM engine is closed")
        return self._started

    def _requests(self) -> Requests:
        return Requests(self._vllm, self._policy.device, self._sync.adapter)

    def _check_length(self, index: int, length: int, max_new: int) -> None:
        if length + max_new > self.max_length:
            raise ValueError(
                f"prompts[{index}] has {length} tokens, and with up to {max_new} more exceeds the "
                f"{self.max_length} that vLLM was started for; raise rollout.vllm.max_model_length or "
                "kv_cache_gib, or lower dataset.max_prompt_length or rollout.max_completion_length"
            )

    def _kv_tensors(self) -> Iterator[Tensor]:
        for cache in self._running().worker.model_runner.kv_caches:
            yield from (cache if isinstance(cache, (list, tuple)) else (cache,))

    def _probe_tokens(self) -> list[int]:
        return probe_tokens(self._policy)[: self.max_length - 1]

    def _probe(self) -> Tensor:
        """(T - 1,) log-probabilities of a fixed text."""
        params = sampling_parameters(GREEDY_PROBE, self._policy.eos_token_ids)
        params.prompt_logprobs, params.flat_logprobs = 0, False
        tokens = self._probe_tokens()
        with self._requests() as requests:
            requests.add(tokens, (0, 0), params)
            ((_, output),) = [item for step in requests.finished() for item in step]
        pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([logprobs[token].logprob for token, logprobs in pairs])

    def _rehearse(self) -> None:
        """Sleep and wake once at level 2; where something does not survive it, repair it and use level 1."""
        kv = {storage_of(tensor) for tensor in self._kv_tensors()}
        unregistered = unregistered_tensors(self._running().model, without=kv)
        values = [tensor.detach().to("cpu", copy=True) for tensor in unregistered]
        before = self._probe()
        self.sleep()
        self.sync(self._policy)
        self.wake()
        if agree(before, self._probe(), self._policy.base_model.dtype):
            return
        with torch.inference_mode():  # in which vLLM may have made them
            for tensor, value in zip(unregistered, values, strict=True):
                tensor.copy_(value)
        self._cycle.level = 1
        require_agreement(self._policy, self._probe_tokens(), self._probe())
        warnings.warn(
            f"{type(self._policy.base_model).__name__} does not survive vLLM's sleep level 2: something of "
            "it lies outside parameters and buffers; level 1 is used, and takes host memory for the weights",
            stacklevel=3,
        )


def request_seed(seed: int, prompt: int, number: int) -> int:
    """A seed of its own, in [0, 2^63), for completion `number` of prompt `prompt`.

    vLLM draws the same noise for requests of one seed, so that equal seeds would make a group of copies.
    """
    digest = hashlib.blake2b(f"{seed} {prompt} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_parameters(sampling: Sampling, eos_ids: Sequence[int]) -> SamplingParams:
    """For vLLM, but for the seed, which each request has its own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=list(eos_ids),
        ignore_eos=True,  # `stop_token_ids` names them all
        logprobs=0,  # of the drawn token alone
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: Any, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Raises FloatingPointError where a log-probability is not a number."""
    token_ids, logprobs = tuple(output.token_ids), tuple(output.logprobs.logprobs)
    if not all(-float("inf") < logprob <= 0.0 for logprob in logprobs):
        raise FloatingPointError(
            "vLLM drew from logits that hold NaN or infinity; the weights have likely diverged: lower the "
            "learning rate, or resume from an earlier checkpoint"
        )
    (text,) = tokenizer.batch_decode(
        [list(token_ids)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return Completion(token_ids, logprobs, text, truncated=output.finish_reason == "length")


class Requests:
    """Requests in flight in one vLLM; leaving the context aborts those that have not ended.

    Args:
        device: where it samples.
        adapter: LoRA that the requests use.
    """

    def __init__(self, engine: LLMEngine, device: torch.device, adapter: LoRARequest | None) -> None:
        self._engine = engine
        self._forked = [device] if device.type == "cuda" else []
        self._adapter = adapter
        # vLLM runs a batch ahead: the last one still names requests of this call when the next call begins.
        self._call = next(_calls)
        self._open: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._open:
            self._engine.abort_request(list(self._open))
            self._open.clear()

    def add(self, prompt: Sequence[int], key: tuple[int, int], params: SamplingParams) -> None:
        name = f"{self._call}-{key[0]}-{key[1]}"
        self._open[name] = key
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params, lora_request=self._adapter)

    def finished(self) -> Iterator[list[tuple[tuple[int, int], Any]]]:
        """After each step of the engine, what has ended with it: (key, vLLM's output)."""
        while self._open:
            # vLLM draws from torch's global random states even where seeds are given: they stay as they are.
            with held_interrupts(), torch.random.fork_rng(devices=self._forked):
                outputs = self._engine.step()
            yield [(self._open.pop(output.request_id), output) for output in outputs if output.finished]

    def tokens(self) -> int:
        """Drawn so far by the requests in flight."""
        states = self._engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """A Ctrl-C arrives when the step is over: vLLM's scheduler cannot be left in the middle of one."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)
