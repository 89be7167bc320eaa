"""The engine without a second copy of anything: it generates with the trainer's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_fast.rollout.decoder import ExpandedDecoder, Prompt, SharedPrefixDecoder
from grpo_fast.rollout.requests import Request, Requests
from grpo_fast.rollout.sampling import draw, make_warper
from grpo_fast.rollout.types import Collector, Completion, RolloutObserver, Sampling, check_prompts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_fast.policy import Policy

DROP_BELOW = 0.9  # finished rows are evicted when fewer than this share of the batch is still going
CPU_BATCH_TOKENS = 2**14  # at once on a CPU unless told otherwise: more only misses its caches, and pages
STOP_MARGIN = 8  # tokens decoded beyond a stop string's bytes: some tokens decode to nothing
Draws = Callable[[Sequence["Row"], int], Tensor]  # rows, and how many tokens they have -> (rows,) float64
Done = Callable[["Row", Completion], None]
Report = Callable[[int], None]


@dataclass(frozen=True)
class Row:
    """A completion to be drawn."""

    prompt: tuple[int, ...]
    max_new: int  # tokens
    key: Any  # whose completion it is


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
        self._require_awake()
        check_prompts(prompts, n)
        if not prompts:
            return []
        self._require_room(max(map(len, prompts)), sampling.max_completion_length)
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)

        def uniforms(rows: Sequence[Row], length: int) -> Tensor:
            return torch.rand(len(rows), generator=generator, dtype=torch.float64)

        collector = Collector(len(prompts), n, observer)
        rows = [
            Row(tuple(prompt), sampling.max_completion_length, (request, number))
            for request, prompt in enumerate(prompts)
            for number in range(n)
        ]
        self._complete_all(
            rows,
            sampling,
            uniforms,
            lambda row, completion: collector.add(row.key[0], row.key[1], completion),
            lambda decoding: collector.report(decoding) if collector.report_due else None,
        )
        return collector.groups()

    def serve(self, requests: Requests) -> None:
        """As the protocol says, in batches: what is asked for while one is drawn waits for the next.

        A batch begins when all clients wait for it, and each request's seed decides alone what is drawn: what
        comes of it does not depend on how long anybody took.
        """
        with closing(requests):
            self._require_awake()
            while (taken := requests.take("all")) is not None:
                alike: dict[Sampling, list[Request]] = {}
                for request in taken:
                    how = replace(request.sampling, max_completion_length=1, seed=None)
                    alike.setdefault(how, []).append(request)
                for how, members in alike.items():
                    self._answer(members, how, requests)

    def _answer(self, asked: Sequence[Request], sampling: Sampling, requests: Requests) -> None:
        """What `serve` has taken and is drawn alike."""
        draws: dict[Request, Tensor] = {}
        rows = []
        for request in sorted(asked, key=lambda request: (request.sampling.seed or 0, request.token_ids)):
            max_new = request.sampling.max_completion_length
            try:
                check_prompts([request.token_ids], 1)
                self._require_room(len(request.token_ids), max_new)
            except ValueError as error:
                requests.give(request, error)
                continue
            generator, seed = torch.Generator(), request.sampling.seed
            generator.seed() if seed is None else generator.manual_seed(seed)
            draws[request] = torch.rand(max_new, generator=generator, dtype=torch.float64)
            rows.append(Row(request.token_ids, max_new, request))
        zero = torch.zeros((), dtype=torch.float64)

        def uniforms(rows: Sequence[Row], length: int) -> Tensor:  # a row that is complete draws nothing
            return torch.stack([draws[r.key][length] if length < r.max_new else zero for r in rows])

        if rows:
            give = lambda row, completion: requests.give(row.key, completion)  # noqa: E731
            self._complete_all(rows, sampling, uniforms, give, requests.report)

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

    def _require_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("generate() on a sleeping engine; call wake() first")

    def _require_room(self, prompt: int, max_new: int) -> None:
        """Raises ValueError where one completion alone exceeds `max_batch_tokens`."""
        largest = self._decoder_type.kv_tokens(1, prompt, 1, max_new)
        if self.max_batch_tokens is not None and largest > self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens = {self.max_batch_tokens} cannot hold one completion of up to {max_new} "
                f"tokens after a prompt of {prompt}; raise it to at least {largest}"
            )

    def _chunks(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Consecutive rows, as many at once as the budget allows. Rows come with ascending lengths."""
        kv_tokens, max_new = self._decoder_type.kv_tokens, max(row.max_new for row in rows)
        once = self._decoder_type.held_once([row.prompt for row in rows])
        budget: float = inf if self.max_batch_tokens is None else self.max_batch_tokens
        if self.max_batch_tokens is None and self._base.device.type == "cpu":
            budget = CPU_BATCH_TOKENS
        chunk: list[Row] = []
        distinct = 0
        for row in rows:
            new = not chunk or row.prompt != chunk[-1].prompt
            own = len(row.prompt) - once
            if chunk and once + kv_tokens(distinct + new, own, len(chunk) + 1, max_new) > budget:
                yield chunk
                chunk, distinct, new = [], 0, True
            chunk.append(row)
            distinct += new
        yield chunk

    def _complete_all(
        self, rows: list[Row], sampling: Sampling, uniforms: Draws, done: Done, report: Report
    ) -> None:
        """Draw a completion for each row.

        Args:
            uniforms: what decides the next token of each of these rows, after so many.
            done: given each completion as it ends.
            report: told of tokens that belong to completions that still go on.
        """
        rows.sort(key=lambda row: (len(row.prompt), row.prompt))  # little padding, equal prompts adjacent
        attention = self._base.config._attn_implementation
        try:
            # Not inference_mode: a buffer that a forward replaces (dynamic RoPE) must remain trainable with.
            with evaluation_mode(self.model), torch.no_grad():
                for chunk in self._chunks(rows):
                    self._complete(chunk, sampling, uniforms, done, report)
        finally:
            self._decoder = None
            self._base.set_attn_implementation(attention)

    def _complete(
        self, rows: Sequence[Row], sampling: Sampling, uniforms: Draws, done: Done, report: Report
    ) -> None:
        """`_complete_all` of rows that are drawn all at once."""
        device, count, max_new = self._base.device, len(rows), max(row.max_new for row in rows)
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        owners = torch.tensor([numbers[row.prompt] for row in rows], device=device)
        limits = torch.tensor([row.max_new for row in rows], device=device)
        eos, warper = torch.tensor(self.eos_ids, device=device), make_warper(sampling)

        self._decoder = decoder = self._decoder_type(self._base, max_new)
        self._base.set_attn_implementation(decoder.attention)
        tokens = torch.zeros(count, max_new, dtype=torch.int64, device=device)
        logprobs = torch.zeros(count, max_new, device=device)
        going = torch.ones(count, dtype=torch.bool, device=device)  # rows that have not ended
        held = torch.arange(count, device=device)  # rows that the decoder computes

        def collect(ended: Tensor, length: int, *, truncated: bool) -> None:
            """Hand over the completions of the rows `ended`, an index."""
            going[ended] = False
            if not len(ended):
                return
            ids = tokens[ended, :length].tolist()
            columns = (ended.tolist(), ids, logprobs[ended, :length].tolist(), self._texts(ids))
            for number, row, row_logprobs, text in zip(*columns, strict=True):
                done(rows[number], Completion(tuple(row), tuple(row_logprobs), text, truncated))

        logits = decoder.prefill(list(numbers), owners)
        for length in range(1, max_new + 1):
            # A uniform for every row, held or not: what is drawn does not depend on which were evicted.
            drawn, drawn_logprobs = draw(logits, uniforms(rows, length - 1).to(device)[held], warper)
            tokens[held, length - 1], logprobs[held, length - 1] = drawn, drawn_logprobs
            ended = torch.isin(drawn, eos)
            if sampling.stop:
                ended |= self._completes_stop(tokens[held, :length], sampling.stop)
            collect(held[going[held] & ended], length, truncated=False)
            collect(held[going[held] & (limits[held] == length)], length, truncated=True)
            alive = going[held]
            living = int(alive.sum())
            report(living * length)
            if living == 0:
                break
            if living < DROP_BELOW * len(held):
                stay = alive.nonzero()[:, 0]
                decoder.keep(stay)
                held, drawn = held[stay], drawn[stay]
            logits = decoder.step(drawn)
        self._decoder = None

    def _completes_stop(self, tokens: Tensor, stop: Sequence[str]) -> Tensor:
        """(rows,) bool: the end of the text of `tokens` (rows, t) holds a stop string."""
        last = max(len(text.encode()) for text in stop) + STOP_MARGIN
        tails = self._texts(tokens[:, -last:].tolist())
        return torch.tensor([any(text in tail for text in stop) for tail in tails], device=tokens.device)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
