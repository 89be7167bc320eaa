"""The engine that generates with vLLM, in the trainer's process and on the trainer's device.

It starts with the policy's weights from memory, and compares its log-probabilities with the policy's. It
sleeps while the trainer works. Each sync takes over the weights and drops what was cached.
"""

from __future__ import annotations

import gc
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.config.section import short
from grpo_fast.distributed.shards import local
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head.parameters import is_quantized
from grpo_fast.policy.host_memory import waiting_on_host
from grpo_fast.policy.out_of_memory import is_out_of_memory
from grpo_fast.policy.source import first_not_finite
from grpo_fast.policy.vision import sees_images
from grpo_fast.rollout.agreement import require_agreement
from grpo_fast.rollout.requests import Request, Requests
from grpo_fast.rollout.sampling import any_seed, seeded
from grpo_fast.rollout.types import (
    Collector,
    Completion,
    PromptTokens,
    RolloutObserver,
    Sampling,
    check_prompts,
)
from grpo_fast.rollout.vllm import convert
from grpo_fast.rollout.vllm.convert import completion_of, content_of, params_of
from grpo_fast.rollout.vllm.settings import choose, require_vision
from grpo_fast.rollout.vllm.sleep import SleepCycle, release_pool
from grpo_fast.rollout.vllm.start import keeping_ranks, start, stopped
from grpo_fast.rollout.vllm.weights import WeightSync, weight_versions

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from grpo_fast.data.images import PromptImages
    from grpo_fast.policy import Policy

    # The rank within the tensor-parallel group, vLLM's prompt and parameters, and a callback for the output.
    Work = tuple[int, Any, SamplingParams, Callable[[Any], object]]
    Arrivals = Callable[[bool], Iterable[Work] | None]

logger = logging.getLogger(__name__)
# Numbers the requests of all engines. vLLM runs a batch ahead, and its last one still names requests of the
# call before.
_numbers = itertools.count()
SMALLER = 0.85  # of the room for the KV cache, in a second start after vLLM ran out of memory


class VLLMEngine:
    """vLLM in the trainer's process. Only one at a time; close it, or use it as a context manager.

    With several ranks, each has an engine and calls `generate`, `sync` and `wake` together with the others.
    Ranks of a tensor-parallel group run all requests in the same order, and exchange their prompts first.
    """

    name = "vllm"

    def __init__(
        self,
        policy: Policy,
        config: VLLMConfig,
        *,
        max_length: int | None = None,
        world: World = SINGLE_PROCESS,
        tells_experts: bool = False,
    ) -> None:
        """Start vLLM and compare it with the policy.

        `max_length` is in tokens, of the longest prompt with its completion. `tells_experts`: return the
        routed experts with completions.

        Raises:
            ImportError, RuntimeError, ValueError: as `start`; ValueError also for a model that vLLM computes
                differently from the policy.
        """
        self._policy, self._config, self._world = policy, config, world
        self._parallel = config.tensor_parallel_size
        self._weights = choose(policy, config)
        self._llm: LLM | None = None
        self._tells_experts = tells_experts
        self._asked_length = max_length
        self._open(1.0, SMALLER)

    def _open(self, *shares: float) -> None:
        """Start vLLM with the first of these shares of the room for its KV cache that fits."""
        problem = ""
        for share in shares:
            if problem:
                logger.warning(
                    "vLLM runs out of memory (%s): it starts again with %g times the room for its KV cache",
                    *(problem, share),
                )
            try:
                self._start(share)
                self.can_shrink = share > SMALLER
                return
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                problem = short(str(error), 200)
                clear_frames(error.__traceback__)  # they hold what vLLM has built
            if self._policy.device.type == "cuda":
                release_pool()
            free_cached()
        raise torch.OutOfMemoryError(
            "vLLM runs out of memory: lower rollout.vllm.kv_cache_gib, gpu_memory_utilization or "
            f"max_sequences, or set rollout.vllm.enforce_eager to true ({problem})"
        )

    def _start(self, share: float) -> None:
        policy, config, world, weights = self._policy, self._config, self._world, self._weights
        try:
            with world.all_succeed("vLLM's start"):
                self._llm, placements = start(
                    policy, config, weights, self._asked_length, world, self._tells_experts, share
                )
                self._cycle = SleepCycle(self._vllm, 0)
            model = self._worker.get_model()
            self._sync = WeightSync(self._vllm, model, policy, placements, weights.adapters)
            del placements  # they would keep the memory of a weight that vLLM repacked
            shared, reason = self._sync.way in ("shared", "adapter"), self._sync.reason
            if config.share_weights is True and not shared:
                raise ValueError(f"rollout.vllm.share_weights = true: {reason}; set it to auto")
            if weights.shared and not shared:
                logger.warning(
                    "vLLM's weights are a copy that stays on the device (%s); "
                    "rollout.vllm.share_weights = false lets it be freed while the trainer works",
                    reason,
                )
            level = config.sleep_level if policy.device.type == "cuda" else 0
            self._cycle.level = (1 if shared else 2) if level == "auto" else level
            self._max_length = int(self._vllm.model_config.max_model_len)  # of a prompt and its completion
            policy.fix_rope(self._max_length)  # as vLLM does
            if self._cycle.level == 2:
                # Waking restores parameters and buffers. Tensors that the model keeps elsewhere come back as
                # garbage, which only the output shows.
                self.sleep()
            self.sync(policy)
            self.wake()
            difference = self._require_agreement()
        except BaseException:
            self.close()
            raise
        if policy.quantized:
            base = f"its own base in full precision, as {weights.obstacle}"
            reason = f"with {'the 4-bit base of the policy' if weights.shared else base}"
        if world.is_main:
            logger.warning(
                "vLLM's weights: %s (%s); its log-probabilities are %.2g nats from the policy's",
                self._sync.way,
                reason,
                difference,
            )

    def generate(
        self,
        prompts: PromptTokens,
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[list[Completion]]:
        """Generate as `Engine` specifies. Completions of a prompt share its KV cache.

        Each completion has its own seed, derived from `sampling.seed` and its place. The same call gives the
        same tokens, up to rounding that depends on the batch.

        Raises:
            RankError: another rank's arguments are invalid.
        """
        with self._world.all_succeed("a rollout's prompts") as asked:
            changed = self._weights_changed()
            check_prompts(prompts, n)
            for index, prompt in enumerate(prompts):
                self._require_servable(f"prompts[{index}]", prompt, sampling)
            shown = images or [None] * len(prompts)
            on_gpu, architecture = self._policy.device.type == "cuda", self._policy.base_model.config
            require_vision(architecture, on_gpu=on_gpu, images=any(shown))
            pairs = zip(prompts, shown, strict=True)
            contents = [content_of(self._policy, prompt, one) for prompt, one in pairs]
            asked.append((changed, contents, n, replace(sampling, seed=any_seed(sampling))))
        if any(changed for changed, *_ in asked):
            self.sync(self._policy)
        collector = Collector(len(prompts), n, observer)

        def collect(index: int, number: int, output: Any) -> None:
            if list(output.prompt_token_ids) != list(prompts[index]):
                raise RuntimeError(
                    f"vLLM reads prompts[{index}] as {len(output.prompt_token_ids)} tokens, and the "
                    f"model's processor as {len(prompts[index])}; set rollout.engine to transformers"
                )
            collector.add(index, number, self._completion(output))

        work: list[Work] = []
        first = self._world.rank - self._place
        for member, (_, given, count, how) in enumerate(asked[first : first + self._parallel]):
            for index, number in itertools.product(range(len(given)), range(count)):
                params = params_of(self._policy, seeded(how, index, number))
                done = partial(collect, index, number) if member == self._place else self._completion
                work.append((member, given[index], params, done))
        batches = iter([work])

        def arrivals(idle: bool) -> Iterable[Work] | None:
            collector.report(self._tokens_in_flight)
            return next(batches, None if idle else ())

        self._run(arrivals)
        return collector.groups()

    def serve(self, requests: Requests) -> None:
        """Serve as `Engine` specifies, without tensor parallelism; requests join those in flight at once."""

        def accepted(taken: Sequence[Request]) -> Iterator[Work]:
            for request in taken:
                ids, sampling = request.token_ids, request.sampling
                try:
                    check_prompts([ids], 1)
                    self._require_servable("a request", ids, sampling)
                except ValueError as error:
                    requests.give(request, error)
                    continue
                params = params_of(self._policy, replace(sampling, seed=any_seed(sampling)))
                yield self._place, content_of(self._policy, ids), params, partial(answer, request)

        def answer(request: Request, output: Any) -> None:
            requests.give(request, self._completion(output))

        def arrivals(idle: bool) -> Iterable[Work] | None:
            requests.report(self._tokens_in_flight)
            taken = requests.take("any" if idle else "none")
            return None if taken is None else accepted(taken)

        with closing(requests):
            if any(self._world.gather_from_all("the requests of a rollout", self._weights_changed)):
                self.sync(self._policy)
            self._run(arrivals)

    def _weights_changed(self) -> bool:
        self._require_open()
        self._cycle.require_awake()
        return weight_versions(self._policy) != self._synced

    def _require_servable(self, name: str, prompt: Sequence[int], sampling: Sampling) -> None:
        if len(prompt) + sampling.max_completion_length > self._max_length:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and with up to {sampling.max_completion_length} more "
                f"exceeds vLLM's context length of {self._max_length}; raise "
                "rollout.vllm.max_model_length or kv_cache_gib, or lower dataset.max_prompt_length or "
                "rollout.max_completion_length"
            )
        if sampling.stop:
            convert.require_same_tokenizer(self._policy.tokenizer, self._vllm.get_tokenizer())

    def sleep(self) -> None:
        self._require_open()
        self._cycle.sleep()

    def sync(self, policy: Policy) -> None:
        """Sync as `Engine` specifies; RuntimeError also for a cache that cannot be dropped."""
        if policy is not self._policy:
            raise ValueError("sync() got another policy than the one this engine was made with")
        vllm, on_gpu = self._vllm, policy.device.type == "cuda"
        with self._world.all_succeed("vLLM's new weights"):
            # From NaN vLLM samples token 0 without an error.
            if name := first_not_finite({n: local(p) for n, p in policy.trainable().items()}):
                raise FloatingPointError(f"the weights {name} hold NaN or infinity: training has diverged")
            if on_gpu:
                torch.cuda.synchronize(policy.device)  # the optimizer's last kernels may still write
            self._cycle.wake_weights()
        # Two places: a rank without room would otherwise repeat the first while the others wait.
        with self._world.all_succeed("the copy of vLLM's weights"):
            self._sync(everything=self._cycle.weights_dropped)
            if on_gpu:
                torch.cuda.synchronize(policy.device)
            self._cycle.weights_loaded()
            if sees_images(policy.base_model.config):
                vllm.reset_encoder_cache()
            if not vllm.reset_prefix_cache():
                raise RuntimeError("vLLM keeps the KV cache of older weights: requests are in flight")
        self._synced = weight_versions(policy)

    def wake(self) -> None:
        self._require_open()
        with self._world.all_succeed("vLLM's waking"):
            self._cycle.wake()

    def freed(self) -> int:
        self._require_open()
        return self._cycle.freed()

    def shrink(self) -> None:
        """Start vLLM again with `SMALLER` of the room for its KV cache, if it has no room to wake in."""
        logger.warning(
            "vLLM has no room to wake in: it starts again with %g times the room for its KV cache", SMALLER
        )
        base = self._policy.base_weights().values()
        # vLLM cannot be closed while asleep. Moving the weights makes room to wake it.
        with waiting_on_host([weight for weight in base if not is_quantized(weight)], self._policy.device):
            if self._weights.shared:
                for parameter in self._worker.get_model().parameters():
                    parameter.data = parameter.new_empty(0)
            self.close()
        self._open(SMALLER)

    def close(self) -> None:
        """Stop vLLM and free its memory, except weights that it shares with the policy."""
        if self._llm is None:
            return
        vllm = self._vllm
        with suppress(RuntimeError):  # without room the memory is freed with the process
            self._cycle.weights_loaded()
            self._cycle.wake()
        self._llm = None
        for name in ("_sync", "_cycle"):
            vars(self).pop(name, None)  # they keep vLLM's memory
        try:
            with keeping_ranks(self._world):
                vllm.engine_core.shutdown()
        except Exception as error:  # must not fail a run that has ended
            logger.warning("vLLM did not stop cleanly: %s", error)
        finally:
            stopped()
            del vllm
            free_cached()

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

    @property
    def _place(self) -> int:
        """This rank's index in its tensor-parallel group."""
        return self._world.rank % self._parallel

    def _require_open(self) -> None:
        _ = self._vllm

    def _run(self, arrivals: Arrivals) -> None:
        """Run requests until `arrivals` returns None; on an error, abort those in flight.

        `arrivals` is called before each step with whether nothing is in flight.
        """
        vllm, adapter = self._vllm, self._sync.adapter
        devices = [self._policy.device] if self._policy.device.type == "cuda" else []
        in_flight: dict[str, Callable[[Any], object]] = {}
        try:
            while (arrived := arrivals(not in_flight)) is not None:
                for member, prompt, params, done in arrived:
                    name = f"{member}-{next(_numbers)}"
                    in_flight[name] = done
                    vllm.add_request(name, prompt, params, lora_request=adapter)
                if not in_flight:
                    continue
                # vLLM uses torch's global random states even with seeds.
                with held_interrupts(), torch.random.fork_rng(devices):
                    outputs = vllm.step()
                finished = [(in_flight.pop(o.request_id), o) for o in outputs if o.finished]
                for done, output in finished:
                    done(output)
        finally:
            if in_flight:
                vllm.abort_request(list(in_flight))

    def _completion(self, output: Any) -> Completion:
        return completion_of(self._policy, output, self._tells_experts)

    def _require_agreement(self) -> float:
        level = self._cycle.level
        remedy = (
            "vLLM implements the model differently, or its reload of the weights is not exact: set "
            f"{'rollout.vllm.sleep_level to 1, or ' * (level == 2)}rollout.engine to transformers"
        )
        model, run = self._policy.base_model, self._policy.run
        return require_agreement(model, self.generate, remedy, max_length=self._max_length, run=run)

    def _tokens_in_flight(self) -> int:
        """Count the tokens of this rank's unfinished requests."""
        states, own = self._vllm.output_processor.request_states, f"{self._place}-"
        detokenizers = [state.detokenizer for name, state in states.items() if name.startswith(own)]
        return sum(detokenizer.num_output_tokens() for detokenizer in detokenizers if detokenizer is not None)


def free_cached() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Delay Ctrl-C to the end of a step, which vLLM's scheduler must finish."""
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
