"""Prompts as vLLM's requests, its outputs as completions, and a loop that leaves none behind."""

from __future__ import annotations

import itertools
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.rollout.types import Completion, Sampling
from grpo_fast.rollout.vllm.process import left_alone

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MASK = 2**64 - 1
_calls = itertools.count()


def mix(value: int) -> int:
    """One round of splitmix64 (Steele et al., 2014): neighbouring inputs, unrelated outputs."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_seed(seed: int, prompt: int, number: int) -> int:
    """A seed of its own, in [0, 2^63), for completion `number` of prompt `prompt`.

    vLLM draws the same noise for requests of one seed, so that equal seeds would make a group of copies.
    """
    return mix(mix(mix(seed & _MASK) ^ prompt) ^ number) >> 1


def sampling_parameters(sampling: Sampling, eos_ids: Sequence[int]) -> Any:
    """vLLM's `SamplingParams` but for the seed, which each request has its own."""
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


def base_seed(sampling: Sampling) -> int:
    return secrets.randbits(63) if sampling.seed is None else sampling.seed


def completion_of(output: Any, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """
    Raises:
        FloatingPointError: a log-probability is not a number.
    """
    token_ids, logprobs = tuple(output.token_ids), tuple(output.logprobs.logprobs)
    if not all(-float("inf") < logprob <= 0.0 for logprob in logprobs):
        raise FloatingPointError(
            "vLLM drew from logits that hold NaN or infinity; the weights have likely diverged: lower the "
            "learning rate, or resume from an earlier checkpoint"
        )
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Completion(token_ids, logprobs, text, truncated=output.finish_reason == "length")


class Requests:
    """Requests in flight in one vLLM; leaving the context aborts those that have not ended.

    Args:
        engine: vLLM's `LLMEngine`.
        device: where it samples.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        # vLLM runs a batch ahead: the last one still names requests of this call when the next call begins.
        self._call = next(_calls)
        self._open: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._open:
            self._engine.abort_request(list(self._open))
            self._open.clear()

    def add(self, prompt: Sequence[int], key: tuple[int, int], params: Any, adapter: Any) -> None:
        name = f"{self._call}-{key[0]}-{key[1]}"
        self._open[name] = key
        prompt_of = {"prompt_token_ids": list(prompt)}
        self._engine.add_request(name, prompt_of, params, lora_request=adapter)

    def finished(self) -> Iterator[list[tuple[tuple[int, int], Any]]]:
        """After each step of the engine, what has ended with it: (key, vLLM's output)."""
        while self._open:
            with held_interrupts(), left_alone(self._device):
                outputs = self._engine.step()
            yield [(self._open.pop(output.request_id), output) for output in outputs if output.finished]

    def tokens(self) -> int:
        """Drawn so far by the requests in flight."""
        states = self._engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states)


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
