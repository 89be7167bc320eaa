"""The engine without a second copy of anything: it generates with the trainer's own model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast.rollout.decoder import ExpandedDecoder, Prompt, SharedPrefixDecoder
from grpo_fast.rollout.sampling import Warper, draw, make_warper
from grpo_fast.rollout.types import Collector, Completion, RolloutObserver, Sampling, check_prompts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_fast.policy import Policy

DROP_BELOW = 0.9  # finished rows are evicted when fewer than this share of the batch is still going
CPU_BATCH_TOKENS = 2**14  # at once on a CPU unless told otherwise: more only misses its caches, and pages
STOP_MARGIN = 8  # tokens decoded beyond a stop string's bytes: some tokens decode to nothing


@dataclass(frozen=True)
class Row:
    """A completion to be drawn."""

    prompt: tuple[int, ...]
    request: int  # which of the caller's prompts
    number: int  # which of its completions


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Neither dropout nor checkpointing, which drops the cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class TransformersEngine:
    """Batched generation with a transformers model that is also being trained.

    Nothing is copied, so `sync` has nothing to do and `sleep` nothing to free. Prompts are prefilled once
    for all their completions, rows leave the batch as they finish, and only the last position meets the head.
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_ids: Iterable[int],
        max_batch_tokens: int | None = None,
    ) -> None:
        """
        Args:
            model: a causal model, or a peft model around one.
            tokenizer: decodes completions.
            eos_ids: any of these tokens ends a completion.
            max_batch_tokens: tokens whose keys and values may be held at once; none: all of a call, or
                on a CPU what keeps it fast.

        Raises:
            ValueError: `eos_ids` is empty.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_batch_tokens = max_batch_tokens
        if not self.eos_ids:
            raise ValueError("eos_ids is empty: no completion would ever end; pass the tokenizer's end token")
        inner: Any = model
        self._base: PreTrainedModel = inner.get_base_model() if hasattr(inner, "peft_config") else inner
        shares = SharedPrefixDecoder.supports(self._base)
        self._decoder_type = SharedPrefixDecoder if shares else ExpandedDecoder
        self._decoder: SharedPrefixDecoder | ExpandedDecoder | None = None
        self._asleep = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """As the protocol says. A completion's text keeps the stop string that ended it.

        Raises:
            ValueError: an empty prompt, `n` below 1, or a completion that alone exceeds `max_batch_tokens`.
        """
        if self._asleep:
            raise RuntimeError("generate() on a sleeping engine; call wake() first")
        check_prompts(prompts, n)
        if not prompts:
            return []
        warper = make_warper(sampling)
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)

        rows = [Row(tuple(prompt), request, i) for request, prompt in enumerate(prompts) for i in range(n)]
        rows.sort(key=lambda row: (len(row.prompt), row.prompt))  # little padding, equal prompts adjacent
        collector = Collector(len(prompts), n, observer)
        attention = self._base.config._attn_implementation
        try:
            # Not inference_mode: a buffer that a forward replaces (dynamic RoPE) must remain trainable with.
            with evaluation_mode(self.model), torch.no_grad():
                for chunk in self._chunks(rows, sampling.max_completion_length):
                    self._complete(chunk, sampling, warper, generator, collector)
        finally:
            self._decoder = None
            self._base.set_attn_implementation(attention)
        return collector.groups()

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def sync(self, policy: Policy) -> None:
        """The policy's weights, adapters included, are the engine's: there is nothing to take over."""
        if policy.model is not self.model:
            raise ValueError(
                "sync() got another policy, whose model is not the one this engine generates with"
            )

    def memory(self) -> dict[str, int]:
        return {"kv_cache": 0 if self._decoder is None else self._decoder.memory()}

    def freed(self) -> int:
        return 0  # keys and values come from the same allocator as the trainer's tensors

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._decoder = None

    def _chunks(self, rows: Sequence[Row], max_new: int) -> Iterator[list[Row]]:
        """Consecutive rows, as many at once as the budget allows. Rows come with ascending lengths."""
        kv_tokens, longest = self._decoder_type.kv_tokens, len(rows[-1].prompt)
        largest = kv_tokens(1, longest, 1, max_new)
        budget: float = inf if self.max_batch_tokens is None else self.max_batch_tokens
        if self.max_batch_tokens is None and self._base.device.type == "cpu":
            budget = max(CPU_BATCH_TOKENS, largest)
        if largest > budget:
            raise ValueError(
                f"max_batch_tokens = {budget} cannot hold one completion of up to {max_new} tokens after "
                f"a prompt of {longest}; raise it to at least {largest}"
            )
        chunk: list[Row] = []
        distinct = 0
        for row in rows:
            new = not chunk or row.prompt != chunk[-1].prompt
            if chunk and kv_tokens(distinct + new, len(row.prompt), len(chunk) + 1, max_new) > budget:
                yield chunk
                chunk, distinct, new = [], 0, True
            chunk.append(row)
            distinct += new
        yield chunk

    def _complete(
        self,
        rows: Sequence[Row],
        sampling: Sampling,
        warper: Warper | None,
        generator: torch.Generator,
        collector: Collector,
    ) -> None:
        """Draw one completion for each row, all at once; each is collected when it ends."""
        device, count, max_new = self._base.device, len(rows), sampling.max_completion_length
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        owners = torch.tensor([numbers[row.prompt] for row in rows], device=device)
        eos = torch.tensor(self.eos_ids, device=device)

        self._decoder = decoder = self._decoder_type(self._base, max_new)
        self._base.set_attn_implementation(decoder.attention)
        tokens = torch.zeros(count, max_new, dtype=torch.int64, device=device)
        logprobs = torch.zeros(count, max_new, device=device)
        going = torch.ones(count, dtype=torch.bool, device=device)  # rows that have not ended
        held = torch.arange(count, device=device)  # rows that the decoder computes

        def collect(done: Tensor, length: int, *, truncated: bool) -> None:
            """Hand over the completions of the rows `done`, an index."""
            if not len(done):
                return
            ids = tokens[done, :length].tolist()
            columns = (done.tolist(), ids, logprobs[done, :length].tolist(), self._texts(ids))
            for number, row, row_logprobs, text in zip(*columns, strict=True):
                completion = Completion(tuple(row), tuple(row_logprobs), text, truncated)
                collector.add(rows[number].request, rows[number].number, completion)

        logits = decoder.prefill(list(numbers), owners)
        for length in range(1, max_new + 1):
            # A uniform for every row, held or not: what is drawn does not depend on which were evicted.
            uniforms = torch.rand(count, generator=generator, dtype=torch.float64).to(device)
            drawn, drawn_logprobs = draw(logits, uniforms[held], warper)
            tokens[held, length - 1], logprobs[held, length - 1] = drawn, drawn_logprobs
            ended = torch.isin(drawn, eos)
            if sampling.stop:
                ended |= self._completes_stop(tokens[held, :length], sampling.stop)
            done = held[going[held] & ended]
            going[done] = False
            collect(done, length, truncated=False)
            alive = going[held]
            living = int(alive.sum())
            collector.report(living * length)
            if living == 0 or length == max_new:
                break
            if living < DROP_BELOW * len(held):
                stay = alive.nonzero()[:, 0]
                decoder.keep(stay)
                held, drawn = held[stay], drawn[stay]
            logits = decoder.step(drawn)
        self._decoder = None
        collect(going.nonzero()[:, 0], max_new, truncated=True)
        collector.report(0)

    def _completes_stop(self, tokens: Tensor, stop: Sequence[str]) -> Tensor:
        """(rows,) bool: the end of the text of `tokens` (rows, t) holds a stop string."""
        last = max(len(text.encode()) for text in stop) + STOP_MARGIN
        tails = self._texts(tokens[:, -last:].tolist())
        return torch.tensor([any(text in tail for text in stop) for tail in tails], device=tokens.device)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
