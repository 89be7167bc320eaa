"""A batch of completions, sampled from the logits of `decoder.py` or `generate.py`.

Temperature, stop strings, seeds and length limits are handled here, and so are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fast.data.table import UNKNOWN
from grpo_fast.data.text import completion_texts, raw_texts
from grpo_fast.rollout.sampling import draw, make_warper
from grpo_fast.rollout.types import Completion, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_fast.data.images import PromptImages

STOP_MARGIN = 8  # tokens decoded beyond the bytes of a stop string, as some decode to nothing

Report = Callable[[Callable[[], int]], None]
TakeExperts = Callable[[], list[Tensor]]  # as `policy.routing.recorded` yields it


@dataclass(frozen=True, eq=False)
class Pending:
    """A completion to sample."""

    prompt: tuple[int, ...]
    uniforms: Tensor  # (max tokens,) float64 in [0, 1), one for each token
    done: Callable[[Completion], None]
    images: PromptImages | None = None  # of the prompt


class Batch:
    """R completions during sampling.

    Args:
        pending: the completions, one per row.
        sampling: without its length limit and seed, which `uniforms` decide.
        shares_prompts: a prompt is prefilled once for all its rows.
        report: called after each token with a function that counts the tokens of unfinished rows.
        take_experts: returns the experts of the forwards since its last call; None: they are not needed.

    Attributes:
        prompts: the U prompts to prefill.
        owners: (R,) int64, ascending: the prompt of each row.
        max_new: tokens of the longest completion.
        going: (r,) bool: which of the remaining rows are unfinished.
        left: the number of unfinished rows.
    """

    def __init__(
        self,
        pending: Sequence[Pending],
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        device: torch.device,
        *,
        shares_prompts: bool,
        report: Report,
        take_experts: TakeExperts | None = None,
    ) -> None:
        self.pending, self.max_new = pending, max(len(row.uniforms) for row in pending)
        self.prompts = [row.prompt for row in pending]
        if shares_prompts:
            self.prompts = list(dict.fromkeys(self.prompts))
        numbers = {prompt: number for number, prompt in enumerate(self.prompts)}
        owners = [numbers[row.prompt] for row in pending] if shares_prompts else range(len(pending))
        self.owners = torch.tensor(owners, device=device)
        self.left = len(pending)
        self.going = torch.ones(len(pending), dtype=torch.bool, device=device)
        self._rows = torch.arange(len(pending), device=device)
        self._limits = torch.tensor([len(row.uniforms) for row in pending], device=device)
        self._uniforms = pad_sequence([row.uniforms for row in pending]).to(device)  # (max_new, R)
        self._tokens = torch.zeros_like(self._uniforms, dtype=torch.int64)
        self._logprobs = torch.zeros_like(self._uniforms, dtype=torch.float32)
        self._length = 0  # tokens of each row
        self._warper, self._stop = make_warper(sampling), sampling.stop
        self._tokenizer, self._eos = tokenizer, torch.tensor(eos_ids, device=device)
        self._end_ids = tuple(eos_ids)
        self._report, self._take = report, take_experts
        self._experts: _Experts | None = None

    @torch.no_grad()
    def sample(self, logits: Tensor) -> Tensor:
        """Sample (r,) int64 tokens from (r, V) logits, and hand over the completions that they end."""
        self._note_experts()
        place, self._length = self._length, self._length + 1
        tokens, logprobs = draw(logits, self._uniforms[place], self._warper)
        self._tokens[place], self._logprobs[place] = tokens, logprobs
        ended = torch.isin(tokens, self._eos)
        if self._stop:
            ended |= self._completes_stop(self._tokens[: self._length].T)
        over = self.going & (ended | (self._limits == self._length))
        if over.any():
            self._hand_over(over, ~ended)
        self._report(partial(mul, self.left, self._length))
        return tokens

    def drop_ended(self) -> Tensor:
        """Drop the finished rows, and return the (r',) indices of the others among the r before."""
        stay = self.going.nonzero()[:, 0]
        self._rows, self.going, self._limits = (
            of_row[stay] for of_row in (self._rows, self.going, self._limits)
        )
        self._uniforms, self._tokens, self._logprobs = (
            of_token[:, stay] for of_token in (self._uniforms, self._tokens, self._logprobs)
        )
        return stay

    def _hand_over(self, over: Tensor, truncated: Tensor) -> None:
        self.going = self.going & ~over
        ids, logprobs = (part[: self._length, over].T.tolist() for part in (self._tokens, self._logprobs))
        rows = self._rows[over].tolist()
        self.left -= len(rows)
        texts = completion_texts(self._tokenizer, ids, self._end_ids)
        columns = (rows, ids, logprobs, texts, truncated[over].tolist())
        for row, row_ids, row_logprobs, text, cut in zip(*columns, strict=True):
            experts = None if self._experts is None else self._experts.of(row, self._length)
            completion = Completion(tuple(row_ids), tuple(row_logprobs), text, cut, experts=experts)
            self.pending[row].done(completion)

    def _completes_stop(self, tokens: Tensor) -> Tensor:
        last = max(len(text.encode()) for text in self._stop) + STOP_MARGIN
        tails = raw_texts(self._tokenizer, tokens[:, -last:].tolist())
        found = [any(text in tail for text in self._stop) for tail in tails]
        return torch.tensor(found, device=tokens.device)

    def _note_experts(self) -> None:
        if self._take is None:
            return
        if self._experts is None:
            self._experts = _Experts(self.prompts, self.owners.tolist(), self.max_new, self._take())
        else:
            self._experts.add(self._rows, self._length - 1, *self._take())


class _Experts:
    """The routed experts of each row's prompt and completion.

    Args:
        prompts: the prefilled prompts.
        owners: the prompt of each row.
        prefilled: (T, L, k) of each forward of the prefill: the common prefix of all prompts, if it had its
            own, and the rest of each prompt, padded on the left.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[int], max_new: int, prefilled: list[Tensor]
    ) -> None:
        *common, rest = prefilled
        shared = sum(map(len, common))
        of_each = rest.unflatten(0, (len(prompts), -1))
        self._prompts = [
            torch.cat([*common, part[len(part) + shared - len(prompt) :]])
            for part, prompt in zip(of_each, prompts, strict=True)
        ]
        self._owners = owners
        self._own = rest.new_full((len(owners), max_new, *rest.shape[1:]), UNKNOWN)

    def add(self, rows: Tensor, place: int, chosen: Tensor) -> None:
        """Set the (r, L, k) experts of the tokens at `place` of these rows."""
        self._own[rows.cpu(), place] = chosen

    def of(self, row: int, length: int) -> Any:
        """Return the experts of a row of `length` tokens, except for its last token."""
        return torch.cat([self._prompts[self._owners[row]], self._own[row, : length - 1]]).numpy()
