"""The engine without a second copy of anything: it generates with the trainer's own model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from operator import mul
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.data.table import UNKNOWN
from grpo_fast.policy import Policy
from grpo_fast.policy.architecture import fix_rope
from grpo_fast.policy.routing import recorded
from grpo_fast.rollout.choice import fitting_decoder, set_attention
from grpo_fast.rollout.decoder import ExpandedDecoder, InFlight, Prompt, RecomputedDecoder, bounded_steps
from grpo_fast.rollout.images import ImagePrompts
from grpo_fast.rollout.requests import Requests
from grpo_fast.rollout.sampling import draw, make_warper, uniforms_of
from grpo_fast.rollout.types import Collector, Completion, Prompts, RolloutObserver, Sampling, check_prompts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_fast.data.images import PromptImages
    from grpo_fast.policy.vision import Vision

DROP_BELOW = 0.9  # finished rows are evicted when fewer than this share of the batch is still going
CPU_BATCH_TOKENS = 2**14  # at once on a CPU unless configured: more only misses its caches, and pages
STOP_MARGIN = 8  # tokens decoded beyond a stop string's bytes: some tokens decode to nothing

Report = Callable[[Callable[[], int]], None]


@dataclass(frozen=True)
class Row:
    """A completion to be drawn."""

    prompt: tuple[int, ...]
    uniforms: Tensor  # (tokens at most,) float64 in [0, 1): what decides each token
    done: Callable[[Completion], None]


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
        vision: Callable[[], Vision] | None = None,
        tells_experts: bool = False,
    ) -> None:
        """
        Args:
            model: a causal model, or a peft model around one.
            tokenizer: decodes completions.
            eos_ids: any of these tokens ends a completion.
            max_batch_tokens: tokens whose keys and values may be held at once; None: all of a call, or
                on a CPU what keeps it fast.
            vision: what the model sees of images, asked for with the first; None: it sees none.
            tells_experts: completions have the experts that were chosen.

        Raises:
            ValueError: `eos_ids` is empty.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_batch_tokens = max_batch_tokens
        self._vision = vision
        self._images: ImagePrompts | None = None  # of the call
        self.tells_experts = tells_experts
        if not self.eos_ids:
            raise ValueError("eos_ids is empty: no completion would ever end; pass the tokenizer's end token")
        inner: Any = model
        self._base: PreTrainedModel = inner.get_base_model() if hasattr(inner, "peft_config") else inner
        self._asleep = False

    @cached_property
    def _decoder_type(self) -> type[ExpandedDecoder]:
        with self._decoding():
            way = fitting_decoder(self._base)
        if self.tells_experts and way is RecomputedDecoder:
            raise ValueError(
                f"rollout.router_replay = true, and {type(self._base).__name__} computes whole sequences for "
                "each token, each time with experts of its own; leave it out"
            )
        return way

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """The model as decoders need it, and then as it was."""
        attention = self._base.config._attn_implementation
        try:
            # Not inference_mode: a buffer that a forward replaces (dynamic RoPE) must remain trainable with.
            with evaluation_mode(self.model), bounded_steps(self._base), torch.no_grad():
                yield
        finally:
            set_attention(self._base, attention)

    def generate(
        self,
        prompts: Prompts,
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[list[Completion]]:
        """As the protocol says. A completion's text keeps the stop string that ended it.

        Raises:
            ValueError: an empty prompt, `n` below 1, or a completion that alone exceeds `max_batch_tokens`.
        """
        self._require_awake()
        check_prompts(prompts, n)
        self._images = None
        if images is not None:
            if self._vision is None or self._decoder_type is RecomputedDecoder:
                raise ValueError("the prompts have images, which this engine cannot read; use another")
            self._images = ImagePrompts(self._vision(), prompts, images)
            prompts = self._images.prompts
        max_new, collector = sampling.max_completion_length, Collector(len(prompts), n, observer)
        uniforms = uniforms_of(sampling, n * len(prompts))
        rows: list[Row] = []
        for index in sorted(range(len(prompts)), key=lambda index: _order(prompts[index])):
            self._require_room(prompts[index], max_new)
            for number in range(n):
                done = partial(collector.add, index, number)
                rows.append(Row(tuple(prompts[index]), uniforms[:, len(rows)], done))
        self._draw_all(rows, sampling, collector.report)
        return collector.groups()

    def serve(self, requests: Requests) -> None:
        """As the protocol says, in batches: what is asked for while one is drawn waits for the next.

        A batch begins when all clients wait for it, and each request's seed decides alone what is drawn: what
        comes of it does not depend on how long any client took.
        """
        with closing(requests):
            self._require_awake()
            while (taken := requests.take("all")) is not None:
                alike: dict[Sampling, list[Row]] = defaultdict(list)
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
                    row = Row(prompt, uniforms_of(given, 1)[:, 0], partial(requests.give, request))
                    alike[replace(given, max_completion_length=1, seed=None)].append(row)
                for sampling, rows in alike.items():
                    self._draw_all(rows, sampling, requests.report)

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

    def freed(self) -> int:
        return 0  # keys and values come from the same allocator as the trainer's tensors

    def __enter__(self) -> TransformersEngine:
        """Raises ValueError where the model cannot be sampled; a copy of its own has no weights yet."""
        if not self._asleep:
            _ = self._decoder_type
        return self

    def __exit__(self, *exc: object) -> None: ...

    def _require_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("generate() on a sleeping engine; call wake() first")

    def _require_room(self, prompt: Prompt, max_new: int) -> None:
        """Raises ValueError where one completion alone exceeds `max_batch_tokens`."""
        largest = self._decoder_type.kv_tokens(InFlight(1, len(prompt), 1, max_new))
        if self.max_batch_tokens is not None and largest > self.max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens = {self.max_batch_tokens} cannot hold one completion of up to {max_new} "
                f"tokens after a prompt of {len(prompt)}; raise it to at least {largest}"
            )

    def _chunks(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Consecutive rows, as many at once as the budget allows. Rows come with ascending lengths."""
        way, max_new = self._decoder_type, max(len(row.uniforms) for row in rows)
        once = way.held_once([row.prompt for row in rows])
        budget = tokens_at_once(self.max_batch_tokens, self._base.device.type)
        chunk: list[Row] = []
        distinct = 0
        for row in rows:
            new = not chunk or row.prompt != chunk[-1].prompt
            own = len(row.prompt) - once
            needed = once + way.kv_tokens(InFlight(distinct + new, own, len(chunk) + 1, max_new))
            uneven = not way.pads and chunk and len(row.prompt) != len(chunk[0].prompt)
            if chunk and (needed > budget or uneven):
                yield chunk
                chunk, distinct, new = [], 0, True
            chunk.append(row)
            distinct += new
        yield chunk

    def _draw_all(self, rows: list[Row], sampling: Sampling, report: Report) -> None:
        """Draw a completion for each row, in `_order`, by `sampling` but for its length and seed.

        `report` is called with what counts the tokens of completions that still go on.
        """
        if not rows:
            return
        experts = recorded(self._base) if self.tells_experts else nullcontext()
        with self._decoding(), experts as take:
            for chunk in self._chunks(rows):
                self._draw_together(chunk, sampling, report, take)

    def _draw_together(
        self,
        rows: Sequence[Row],
        sampling: Sampling,
        report: Report,
        take: Callable[[], list[Tensor]] | None,
    ) -> None:
        """`_draw_all` of rows that fit beside each other; `take` is of `recorded`."""
        device, count, max_new = self._base.device, len(rows), max(len(row.uniforms) for row in rows)
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        owners = torch.tensor([numbers[row.prompt] for row in rows], device=device)
        limits = torch.tensor([len(row.uniforms) for row in rows], device=device)
        uniforms = pad_sequence([row.uniforms for row in rows]).to(device)  # (max_new, rows)
        eos, warper = torch.tensor(self.eos_ids, device=device), make_warper(sampling)

        decoder = self._decoder_type(self._base, max_new)
        decoder.images = self._images
        set_attention(self._base, decoder.attention)
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
                told = None if experts is None else experts.of(number, length)
                rows[number].done(Completion(tuple(row), tuple(row_logprobs), text, truncated, experts=told))

        logits = decoder.prefill(list(numbers), owners)
        experts = None if take is None else ChosenExperts(list(numbers), owners.tolist(), max_new, take())
        for length in range(1, max_new + 1):
            drawn, drawn_logprobs = draw(logits, uniforms[length - 1, held], warper)
            tokens[held, length - 1], logprobs[held, length - 1] = drawn, drawn_logprobs
            ended = torch.isin(drawn, eos)
            if sampling.stop:
                ended |= self._completes_stop(tokens[held, :length], sampling.stop)
            collect(held[going[held] & ended], length, truncated=False)
            collect(held[going[held] & (limits[held] == length)], length, truncated=True)
            alive = going[held]
            living = int(alive.sum())
            report(partial(mul, living, length))
            if living == 0:
                break
            if living < DROP_BELOW * len(held):
                stay = alive.nonzero()[:, 0]
                decoder.keep(stay)
                held, drawn = held[stay], drawn[stay]
            logits = decoder.step(drawn)
            if experts is not None and take is not None:
                experts.add(held, length - 1, *take())

    def _completes_stop(self, tokens: Tensor, stop: Sequence[str]) -> Tensor:
        """(rows,) bool: the end of the text of `tokens` (rows, t) holds a stop string."""
        last = max(len(text.encode()) for text in stop) + STOP_MARGIN
        tails = self._texts(tokens[:, -last:].tolist())
        return torch.tensor([any(text in tail for text in stop) for tail in tails], device=tokens.device)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class OwnCopyEngine(TransformersEngine):
    """The engine of mode `shard`, where each rank has rows of the policy's weights alone.

    It generates with a copy of the whole model, adapters merged: filled in `sync` by all ranks together, and
    freed in `sleep`. Each rank generates by itself.
    """

    def __init__(self, policy: Policy, *, max_length: int | None = None, **options: Any) -> None:
        """`options` are those of `TransformersEngine`."""
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
            raise ValueError("sync() got another policy than the one that this engine was made with")
        for own in self._weights.values():  # first: a rank without room asks again while the others wait
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


class ChosenExperts:
    """What `recorded` yields while rows are drawn, put together: a row's prompt, then its own tokens.

    Args:
        prompts: those of a prefill, one after the other.
        owners: the prompt of each row.
        prefilled: (T, L, k) of each of its forwards: what all prompts begin with where that was one of its
            own, and the rest of each after padding.
    """

    def __init__(
        self, prompts: Sequence[Prompt], owners: Sequence[int], max_new: int, prefilled: list[Tensor]
    ) -> None:
        *common, rest = prefilled
        shared = sum(map(len, common))
        of_each = rest.unflatten(0, (len(prompts), -1))
        lengths = [len(prompt) - shared for prompt in prompts]
        self._prompts = [
            torch.cat([*common, part[len(part) - length :]])
            for part, length in zip(of_each, lengths, strict=True)
        ]
        self._owners = owners
        self._own = rest.new_full((len(owners), max_new, *rest.shape[1:]), UNKNOWN)

    def add(self, rows: Tensor, place: int, chosen: Tensor) -> None:
        """(R, L, k) of the tokens at `place` of these rows."""
        self._own[rows.cpu(), place] = chosen

    def of(self, row: int, length: int) -> Any:
        """Of a row that ends after `length` tokens, the last of which the model has not read."""
        return torch.cat([self._prompts[self._owners[row]], self._own[row, : length - 1]]).numpy()


def tokens_at_once(max_batch_tokens: int | None, device: str) -> float:
    """Tokens whose keys and values are held at once: `rollout.max_batch_tokens`, or what suits the device."""
    if max_batch_tokens is not None:
        return max_batch_tokens
    return CPU_BATCH_TOKENS if device == "cpu" else inf


def _order(prompt: Prompt) -> tuple[int, tuple[int, ...]]:
    """Sorted so, prompts of a chunk need little padding, and equal ones are adjacent."""
    return len(prompt), tuple(prompt)
