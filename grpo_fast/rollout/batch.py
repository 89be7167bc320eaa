"""Completions that are sampled together, whichever loop computes their logits.

`decoder.py` and `generate.py` compute logits. A `Batch` samples from them, ends rows, and hands completions
over. So `temperature`, `stop`, seeds and length limits mean the same in both.
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

STOP_MARGIN = 8  # tokens decoded beyond a stop string's bytes: some tokens decode to nothing

Report = Callable[[Callable[[], int]], None]
TakeExperts = Callable[[], list[Tensor]]  # as `policy.routing.recorded` yields it


@dataclass(frozen=True, eq=False)
class Pending:
    """A completion to sample."""

    prompt: tuple[int, ...]
    uniforms: Tensor  # (tokens at most,) float64 in [0, 1): each decides one token
    done: Callable[[Completion], None]
    images: PromptImages | None = None  # of the prompt


class Batch:
    """R completions while they grow.

    Args:
        pending: the completions, one per row.
        sampling: its length limit and seed are not read: `uniforms` has both.
        shares_prompts: a prompt is read once for all its rows.
        report: called after each token with a function that counts the tokens of unfinished rows.
        take_experts: experts of the forwards since its last call; None: completions have no `experts`.

    Attributes:
        prompts: what is read first, U prompts.
        owners: (R,) int64, ascending: the prompt of each row.
        max_new: tokens of the longest completion.
        going: (R,) bool, the rows that have not ended.
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
        self.going = torch.ones(len(pending), dtype=torch.bool, device=device)
        self._limits = torch.tensor([len(row.uniforms) for row in pending], device=device)
        self._uniforms = pad_sequence([row.uniforms for row in pending]).to(device)  # (max_new, R)
        self._tokens = torch.zeros(len(pending), self.max_new, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(pending), self.max_new, device=device)
        self._length = 0  # tokens sampled of each row
        self._warper, self._stop = make_warper(sampling), sampling.stop
        self._tokenizer, self._eos = tokenizer, torch.tensor(eos_ids, device=device)
        self._end_ids = tuple(eos_ids)
        self._report, self._take = report, take_experts
        self._experts: _Experts | None = None

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Sample the next token of some rows, and hand over the completions that it ends.

        Args:
            logits: (r, V) of the last forward.
            rows: (r,) int64, the rows of that forward. Those that have ended are sampled, too, in vain.

        Returns:
            (r,) int64 tokens.
        """
        self._note_experts(rows)
        place, self._length = self._length, self._length + 1
        tokens, logprobs = draw(logits, self._uniforms[place, rows], self._warper)
        self._tokens[rows, place], self._logprobs[rows, place] = tokens, logprobs
        ended = torch.isin(tokens, self._eos)
        if self._stop:
            ended |= self._completes_stop(self._tokens[rows, : self._length])
        self._hand_over(rows[self.going[rows] & ended], truncated=False)
        self._hand_over(rows[self.going[rows] & (self._limits[rows] == self._length)], truncated=True)
        self._report(partial(mul, int(self.going.sum()), self._length))
        return tokens

    def _hand_over(self, rows: Tensor, *, truncated: bool) -> None:
        self.going[rows] = False
        if not len(rows):
            return
        ids, logprobs = (part[rows, : self._length].tolist() for part in (self._tokens, self._logprobs))
        texts = completion_texts(self._tokenizer, ids, self._end_ids)
        columns = (rows.tolist(), ids, logprobs, texts)
        for row, row_ids, row_logprobs, text in zip(*columns, strict=True):
            experts = None if self._experts is None else self._experts.of(row, self._length)
            completion = Completion(tuple(row_ids), tuple(row_logprobs), text, truncated, experts=experts)
            self.pending[row].done(completion)

    def _completes_stop(self, tokens: Tensor) -> Tensor:
        """(r,) bool: the end of the text of `tokens` (r, t) holds a stop string."""
        last = max(len(text.encode()) for text in self._stop) + STOP_MARGIN
        tails = raw_texts(self._tokenizer, tokens[:, -last:].tolist())
        found = [any(text in tail for text in self._stop) for tail in tails]
        return torch.tensor(found, device=tokens.device)

    def _note_experts(self, rows: Tensor) -> None:
        if self._take is None:
            return
        if self._experts is None:
            self._experts = _Experts(self.prompts, self.owners.tolist(), self.max_new, self._take())
        else:
            self._experts.add(rows, self._length - 1, *self._take())


class _Experts:
    """The experts that each row's tokens were sent to: of its prompt, then of its own tokens.

    Args:
        prompts: those of a prefill.
        owners: the prompt of each row.
        prefilled: (T, L, k) of each forward of the prefill: first what all prompts begin with, if that was
            read apart, then the rest of each after its padding.
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
        """Note (r, L, k) of the tokens at `place` of these rows."""
        self._own[rows.cpu(), place] = chosen

    def of(self, row: int, length: int) -> Any:
        """Return those of a row that ends after `length` tokens, the last of which the model has not read."""
        return torch.cat([self._prompts[self._owners[row]], self._own[row, : length - 1]]).numpy()
