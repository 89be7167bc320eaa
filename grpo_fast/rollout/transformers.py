"""The engine without a second copy of anything: it generates with the trainer's own model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
        self._decoder_type = (
            SharedPrefixDecoder if SharedPrefixDecoder.supports(self._base) else ExpandedDecoder
        )
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
        """`n` completions for each tokenised prompt, in the order of the prompts.

        The same `sampling.seed` gives the same tokens; the global random state is neither read nor changed.
        A completion ends with an end token or with the token that completes a stop string, and its text
        keeps the stop string.

        Raises:
            RuntimeError: the engine is asleep.
            ValueError: an empty prompt, `n` below 1, or a completion that alone exceeds `max_batch_tokens`.
            FloatingPointError: the model's logits hold NaN.
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
        with self._generating():
            for chunk in self._chunks(rows, sampling.max_completion_length):
                self._complete(chunk, sampling, warper, generator, collector)
        return collector.groups()

    def sleep(self) -> None:
        """Give way to the trainer; the model is the trainer's, so nothing is freed."""
        self._asleep = True

    def wake(self) -> None:
        """Allow `generate` again."""
        self._asleep = False

    def sync(self, policy: Policy) -> None:
        """Nothing: the policy's weights, adapters included, are the engine's.

        Raises:
            ValueError: `policy` holds another model.
        """
        if policy.model is not self.model:
            raise ValueError(
                "sync() got another policy, whose model is not the one this engine generates with"
            )

    def memory(self) -> dict[str, int]:
        """Bytes held beyond the policy's own: keys and values, while generating."""
        return {"kv_cache": self._decoder.memory() if self._decoder is not None else 0}

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._decoder = None

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """The model in evaluation mode (no dropout, no checkpointing, which drops the cache)."""
        training = [module for module in self.model.modules() if module.training]
        attention = self._base.config._attn_implementation
        self.model.eval()
        try:
            # Not inference_mode: a buffer that a forward replaces (dynamic RoPE) must remain trainable with.
            with torch.no_grad():
                yield
        finally:
            self._decoder = None
            self._base.set_attn_implementation(attention)
            for module in training:
                module.training = True

    def _chunks(self, rows: Sequence[Row], max_new: int) -> Iterator[list[Row]]:
        """Consecutive rows, as many at once as the budget allows. Rows come with ascending lengths."""
        kv_tokens = self._decoder_type.kv_tokens
        budget = self.max_batch_tokens
        if budget is None and self._base.device.type == "cpu":
            budget = max(CPU_BATCH_TOKENS, kv_tokens(1, len(rows[-1].prompt), 1, max_new))
        chunk: list[Row] = []
        distinct = 0
        for row in rows:
            new = not chunk or row.prompt != chunk[-1].prompt
            held = kv_tokens(distinct + new, len(row.prompt), len(chunk) + 1, max_new)
            if budget is not None and held > budget and chunk:
                yield chunk
                chunk, distinct, new = [], 0, True
                held = kv_tokens(1, len(row.prompt), 1, max_new)
            if budget is not None and held > budget:
                raise ValueError(
                    f"max_batch_tokens = {budget} cannot hold one completion of up to {max_new} tokens after "
                    f"a prompt of {len(row.prompt)}; raise it to at least {held}"
                )
            chunk.append(row)
            distinct += new
        if chunk:
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
        ends = torch.zeros(count, dtype=torch.int64, device=device)  # length once ended; 0: going on
        held = torch.arange(count, device=device)  # the rows that the decoder computes

        def collect(done: Tensor) -> None:
            """Hand over the completions of the rows `done`, an index; one that has no end was cut off."""
            if not len(done):
                return
            lengths = torch.where(ends[done] == 0, max_new, ends[done]).tolist()
            ids = [row[:length] for row, length in zip(tokens[done].tolist(), lengths, strict=True)]
            texts = self.tokenizer.batch_decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            columns = (done.tolist(), ids, logprobs[done].tolist(), texts, ends[done].tolist())
            for number, row, row_logprobs, text, end in zip(*columns, strict=True):
                completion = Completion(tuple(row), tuple(row_logprobs[: len(row)]), text, truncated=end == 0)
                collector.add(rows[number].request, rows[number].number, completion)

        logits = decoder.prefill(list(numbers), owners)
        for position in range(max_new):
            # A uniform for every row, held or not: what is drawn does not depend on which were evicted.
            uniforms = torch.rand(count, generator=generator, dtype=torch.float64).to(device)
            drawn, drawn_logprobs = draw(logits, uniforms[held], warper)
            tokens[held, position], logprobs[held, position] = drawn, drawn_logprobs
            ended = torch.isin(drawn, eos)
            if sampling.stop:
                ended |= self._completes_stop(tokens[held, : position + 1], sampling.stop)
            now = held[(ends[held] == 0) & ended]
            ends[now] = position + 1
            collect(now)
            alive = ends[held] == 0
            living = int(alive.sum())
            collector.report(living * (position + 1))
            if living == 0 or position + 1 == max_new:
                break
            if living < DROP_BELOW * len(held):
                stay = alive.nonzero()[:, 0]
                decoder.keep(stay)
                held, drawn = held[stay], drawn[stay]
            logits = decoder.step(drawn)
        self._decoder = None
        collect(held[ends[held] == 0])
        collector.report(0)

    def _completes_stop(self, tokens: Tensor, stop: Sequence[str]) -> Tensor:
        """(rows,) bool: the end of the text of `tokens` (rows, t) holds a stop string."""
        tail = max(len(text.encode()) for text in stop) + STOP_MARGIN
        texts = self.tokenizer.batch_decode(tokens[:, -tail:].tolist(), clean_up_tokenization_spaces=False)
        return torch.tensor([any(text in tail for text in stop) for tail in texts], device=tokens.device)
