"""The engine that generates with vLLM, in the trainer's process and on the trainer's device.

It starts with the policy's weights from memory and compares what it computes with the policy before anything
depends on it. While the trainer works it sleeps; afterwards it takes over the weights, forgets what it had
cached, and goes on.
"""

from __future__ import annotations

import gc
import itertools
import logging
import secrets
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.distributed.shards import local
from grpo_fast.distributed.world import ALONE, World
from grpo_fast.policy.finite import first_not_finite
from grpo_fast.rollout.config import VLLMConfig
from grpo_fast.rollout.requests import Request, Requests
from grpo_fast.rollout.sampling import request_seed
from grpo_fast.rollout.types import Collector, Completion, RolloutObserver, Sampling, check_prompts
from grpo_fast.rollout.vllm.checks import (
    agree,
    probe_tokens,
    require_agreement,
    require_same_tokenizer,
    unregistered_tensors,
)
from grpo_fast.rollout.vllm.sleep import SleepCycle
from grpo_fast.rollout.vllm.start import choose, keeping_ranks, start, stopped
from grpo_fast.rollout.vllm.weights import WeightSync, fingerprint, size_in_bytes, storage_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from grpo_fast.policy import Policy

    Asking = tuple["Key", Sequence[int], SamplingParams]
    Arrivals = Callable[[bool], Iterable[Asking] | None]

logger = logging.getLogger(__name__)
Key = tuple[int, int, int]  # a completion's rank among vLLM's, its prompt, and its number among the prompt's
_calls = itertools.count()


@dataclass(frozen=True)
class Asked:
    """What a rank wants to be generated."""

    prompts: Sequence[Sequence[int]]
    n: int
    sampling: Sampling
    seed: int
    weights_changed: bool


class VLLMEngine:
    """vLLM beside the trainer. One at a time in a process; close it, or use it as a context manager.

    Of several ranks each has one, and calls `generate`, `sync` and `wake` when the others do. Those of a
    tensor-parallel vLLM must run all requests in the same order: they exchange their prompts first.
    """

    name = "vllm"

    def __init__(
        self,
        policy: Policy,
        config: VLLMConfig,
        *,
        max_length: int | None = None,
        world: World = ALONE,
    ) -> None:
        """
        Args:
            policy: whose weights generate; the engine keeps it.
            config: the run's `rollout.vllm`.
            max_length: tokens of the longest prompt and its completion; none: as the configuration says.
            world: the ranks, in all of which an engine is made.

        Raises:
            ImportError: vLLM is missing or of an unknown version.
            RuntimeError: a vLLM engine is running in this process.
            ValueError: a setting that this device or policy cannot have, or a model that vLLM computes
                differently from the policy.
        """
        self._policy = policy
        self._world = world
        self._take_place(config.tensor_parallel_size)
        choices = choose(policy, config)
        self._weights_sleep = choices.weights_sleep
        self._llm: LLM | None
        self._llm, placements, self._weight_bytes = start(
            policy, config, choices, max_length=max_length, world=world
        )
        try:
            self._cycle = SleepCycle(self._vllm, 0)
            self._sync = WeightSync(
                self._vllm, self._worker.get_model(), policy, placements, adapters=choices.adapters
            )
            del placements  # of a weight that vLLM repacked they would keep the memory
            shared, reason = self._sync.way in ("shared", "adapter"), self._sync.reason
            if config.share_weights is True and not shared:
                raise ValueError(f"rollout.vllm.share_weights = true: {reason}; set it to auto")
            if choices.shares and not shared:
                logger.warning(
                    "vLLM's weights are a copy that stays on the device, for %s; "
                    "rollout.vllm.share_weights = false lets it be freed while the trainer works",
                    reason,
                )
            level = (1 if shared else 2) if choices.level == "auto" else choices.level
            self._cycle.level = level
            self._max_length = int(self._vllm.model_config.max_model_len)  # of a prompt and its completion
            self._probe = probe_tokens(policy)[: self._max_length - 1]
            self.sync(policy)
            apart = require_agreement(policy, self._probe, self._probe_logprobs())
            if policy.quantized:
                own = f"a base of its own in full precision, for {choices.obstacle}"
                reason = f"beside {'the 4-bit base of the policy' if choices.shares else own}"
            if world.leads:
                logger.warning(
                    "vLLM's weights: %s (%s); its log-probabilities are %.2g nats from the policy's",
                    self._sync.way,
                    reason,
                    apart,
                )
            if level == 2:
                self._rehearse()
        except BaseException:
            self.close()
            raise

    def _take_place(self, parallel: int) -> None:
        """Consecutive ranks share a vLLM."""
        self._place = self._world.rank % parallel
        first = self._world.rank - self._place
        self._members = slice(first, first + parallel)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """As the protocol says. All are in flight at once, and those of a prompt share its KV cache.

        Each has a seed of its own, made of `sampling.seed`, its prompt's number and its own: the same call
        gives the same tokens, up to the rounding that other batches bring. Whatever ends the call early,
        nothing stays behind in vLLM.

        Raises:
            RankError: what another rank asks for cannot be.
        """
        asked = self._world.together("a rollout's prompts", lambda: self._asked(prompts, n, sampling))
        if any(ask.weights_changed for ask in asked):
            self.sync(self._policy)
        collector = Collector(len(prompts), n, observer)
        requests = (
            ((member, *key), ask.prompts[key[0]], self._params(ask.sampling, request_seed(ask.seed, *key)))
            for member, ask in enumerate(asked[self._members])
            for key in itertools.product(range(len(ask.prompts)), range(ask.n))
        )
        batches = iter([requests])
        with closing(self._run(lambda idle: next(batches, None))) as steps:
            for finished in steps:
                for (member, prompt, number), output in finished:
                    completion = completion_of(output.outputs[0], self._policy.tokenizer)
                    if member == self._place:
                        collector.add(prompt, number, completion)
                if collector.report_due:
                    collector.report(self._tokens_in_flight())
        return collector.groups()

    def serve(self, requests: Requests) -> None:
        """As the protocol says: a request joins those in flight as soon as it is asked for.

        Each rank serves its own; none shares its vLLM with another.
        """

        def ready() -> bool:
            self._require_open()
            self._cycle.require_awake()
            return fingerprint(self._policy) != self._synced

        numbers = itertools.count()
        asked: dict[int, Request] = {}

        def arrivals(idle: bool) -> Iterator[Asking] | None:
            requests.report(self._tokens_in_flight())
            if (taken := requests.take("any" if idle else "none")) is None:
                return None
            return self._accepted(taken, asked, numbers, requests)

        with closing(requests):
            if any(self._world.together("the requests of a rollout", ready)):
                self.sync(self._policy)
            with closing(self._run(arrivals)) as steps:
                for finished in steps:
                    for (_, number, _), output in finished:
                        answer = completion_of(output.outputs[0], self._policy.tokenizer)
                        requests.give(asked.pop(number), answer)
                    if requests.closed:
                        break

    def _accepted(
        self, taken: Sequence[Request], asked: dict[int, Request], numbers: Iterator[int], requests: Requests
    ) -> Iterator[Asking]:
        """What vLLM is to draw of `taken`; a request for which there is no room is answered at once."""
        for request in taken:
            try:
                check_prompts([request.token_ids], 1)
                self._require_room(request.token_ids, request.sampling, "a request")
                self._require_stops(request.sampling)
            except ValueError as error:
                requests.give(request, error)
                continue
            asked[number := next(numbers)] = request
            params = self._params(request.sampling, seed_of(request.sampling))
            yield (self._place, number, 0), request.token_ids, params

    def _require_room(self, prompt: Sequence[int], sampling: Sampling, name: str) -> None:
        if len(prompt) + sampling.max_completion_length > self._max_length:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and with up to {sampling.max_completion_length} more "
                f"exceeds the {self._max_length} that vLLM was started for; raise "
                "rollout.vllm.max_model_length or kv_cache_gib, or lower dataset.max_prompt_length or "
                "rollout.max_completion_length"
            )

    def _require_stops(self, sampling: Sampling) -> None:
        if sampling.stop:
            require_same_tokenizer(self._policy.tokenizer, self._vllm.get_tokenizer())

    def _asked(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Asked:
        """Raises as `generate`."""
        self._require_open()
        self._cycle.require_awake()
        check_prompts(prompts, n)
        for index, prompt in enumerate(prompts):
            self._require_room(prompt, sampling, f"prompts[{index}]")
        self._require_stops(sampling)
        seed = seed_of(sampling)
        changed = fingerprint(self._policy) != self._synced
        return Asked(prompts, n, sampling, seed, changed)

    def sleep(self) -> None:
        self._require_open()
        self._cycle.sleep()

    def sync(self, policy: Policy) -> None:
        """As the protocol says.

        Raises:
            FloatingPointError: the weights hold NaN or infinity.
            RuntimeError: no memory for the weights, or cached keys and values that cannot be dropped.
        """
        if policy is not self._policy:
            raise ValueError("sync() got another policy than the one this engine was made with")
        vllm, on_gpu = self._vllm, policy.device.type == "cuda"

        def ready() -> None:
            # From NaN vLLM draws token 0, and does not tell.
            if name := first_not_finite({n: local(p) for n, p in policy.trainable().items()}):
                raise FloatingPointError(f"the weights {name} hold NaN or infinity: training has diverged")
            if on_gpu:
                torch.cuda.synchronize(policy.device)  # the optimiser's last kernels may still be writing
            self._cycle.wake_weights()

        self._world.together("vLLM's new weights", ready)
        self._sync(everything=self._cycle.weights_dropped)
        if on_gpu:
            torch.cuda.synchronize(policy.device)
        self._cycle.weights_loaded()
        if not vllm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps cached keys and values of older weights: requests are in flight")
        self._synced = fingerprint(policy)

    def wake(self) -> None:
        self._require_open()
        self._world.together("vLLM's waking", self._cycle.wake)

    def memory(self) -> dict[str, int]:
        """Bytes on the device: weights besides the policy's own, and the KV cache."""
        return {part: 0 if asleep else size for part, size, asleep in self._parts()}

    def freed(self) -> int:
        return sum(size for _, size, asleep in self._parts() if asleep)

    def _parts(self) -> list[tuple[str, int, bool]]:
        """Name, bytes, and whether they are given back."""
        self._require_open()
        asleep, weights = self._cycle.asleep, self._weight_bytes
        kv_cache = size_in_bytes(self._kv_tensors())
        return [
            ("weights", weights, self._weights_sleep and "weights" in asleep),
            ("kv_cache", kv_cache, "kv_cache" in asleep),
        ]

    def close(self) -> None:
        """Stop vLLM and free what it holds. The policy stays as it is, shared weights included.

        torch.distributed goes with it, unless there are other ranks.
        """
        if self._llm is None:
            return
        vllm = self._vllm
        with suppress(RuntimeError):  # no room: what sleeps, vLLM cannot free; it goes with the process
            self._cycle.weights_loaded()
            self._cycle.wake()
        self._llm = None
        for name in ("_sync", "_cycle"):
            vars(self).pop(name, None)  # what refers to vLLM's memory keeps it
        try:
            with keeping_ranks(self._world):
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
        if self._llm is None:
            raise RuntimeError("the vLLM engine is closed")
        return self._llm.llm_engine

    @property
    def _worker(self) -> Any:
        return self._vllm.model_executor.driver_worker.worker

    def _require_open(self) -> None:
        _ = self._vllm

    def _kv_tensors(self) -> Iterator[Tensor]:
        for cache in self._worker.model_runner.kv_caches:
            yield from (cache if isinstance(cache, (list, tuple)) else (cache,))

    def _run(self, arrivals: Arrivals) -> Generator[list[tuple[Key, Any]]]:
        """After each step of vLLM, what has ended with it; closing the iterator aborts what has not.

        Args:
            arrivals: keys, prompts and how completions are drawn, of requests that have come; asked before
                every step, and told whether nothing is in flight. None ends the run, as soon as nothing is.

        Yields:
            Keys and vLLM's outputs.
        """
        vllm, adapter, call = self._vllm, self._sync.adapter, next(_calls)
        on_gpu = self._policy.device.type == "cuda"
        in_flight: dict[str, Key] = {}
        try:
            while True:
                arrived = arrivals(not in_flight)
                for key, prompt, params in arrived or ():
                    # vLLM runs a batch ahead: the last one still names requests of this call in the next one.
                    name = "-".join(map(str, (key[0], call, *key[1:])))
                    in_flight[name] = key
                    vllm.add_request(name, {"prompt_token_ids": list(prompt)}, params, lora_request=adapter)
                if not in_flight:
                    if arrived is None:
                        return
                    continue
                # vLLM draws from torch's global random states even where seeds are given: they stay.
                with held_interrupts(), torch.random.fork_rng([self._policy.device] if on_gpu else []):
                    outputs = vllm.step()
                yield [(in_flight.pop(o.request_id), o) for o in outputs if o.finished]
        finally:
            if in_flight:
                vllm.abort_request(list(in_flight))

    def _params(self, sampling: Sampling, seed: int | None = None) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_completion_length,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=list(self._policy.eos_token_ids),
            ignore_eos=True,  # `stop_token_ids` names them all
            logprobs=0 if sampling.logprobs else None,  # 0: of the drawn token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _tokens_in_flight(self) -> int:
        """Drawn so far by this rank's requests that have not ended."""
        states, own = self._vllm.output_processor.request_states, f"{self._place}-"
        detokenizers = [state.detokenizer for name, state in states.items() if name.startswith(own)]
        return sum(detokenizer.num_output_tokens() for detokenizer in detokenizers if detokenizer is not None)

    def _probe_logprobs(self) -> Tensor:
        """(T - 1,) of a fixed text's tokens but the first."""
        params = self._params(Sampling(max_completion_length=1, temperature=0.0))
        params.prompt_logprobs, params.flat_logprobs = 0, False
        batches = iter([[((0, 0, 0), self._probe, params)]])
        ((_, output),) = itertools.chain.from_iterable(self._run(lambda idle: next(batches, None)))
        pairs = zip(self._probe[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([logprobs[token].logprob for token, logprobs in pairs])

    def _rehearse(self) -> None:
        """Sleep and wake once at level 2; where something does not survive it, repair it and use level 1."""
        kv = {storage_of(tensor) for tensor in self._kv_tensors()}
        unregistered = unregistered_tensors(self._worker.get_model(), without=kv)
        values = [tensor.detach().to("cpu", copy=True) for tensor in unregistered]
        before = self._probe_logprobs()
        self.sleep()
        self.sync(self._policy)
        self.wake()
        if agree(before, self._probe_logprobs(), self._policy.base_model.dtype):
            return
        with torch.inference_mode():  # in which vLLM may have made them
            for tensor, value in zip(unregistered, values, strict=True):
                tensor.copy_(value)
        self._cycle.level = 1
        require_agreement(self._policy, self._probe, self._probe_logprobs())
        warnings.warn(
            f"{type(self._policy.base_model).__name__} does not survive vLLM's sleep level 2: something of "
            "it lies outside parameters and buffers; level 1 is used, and takes host memory for the weights",
            stacklevel=3,
        )


def seed_of(sampling: Sampling) -> int:
    """Any where none is given: from the global state, which `_run` keeps, each token would get one noise."""
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


def completion_of(output: Any, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Raises FloatingPointError where a log-probability is not a number."""
    token_ids = tuple(output.token_ids)
    logprobs = None if output.logprobs is None else tuple(output.logprobs.logprobs)
    if not all(-float("inf") < logprob <= 0.0 for logprob in logprobs or ()):
        raise FloatingPointError(
            "vLLM drew from logits that hold NaN or infinity: the weights have likely diverged"
        )
    (text,) = tokenizer.batch_decode(
        [list(token_ids)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return Completion(token_ids, logprobs, text, truncated=output.finish_reason == "length")


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
