"""Sample batches of prompts in endless shuffled epochs; exact after a resume."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.data.types import Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_fast.data.table import CompletionTable


class PromptSampler:
    """Sample each prompt once per epoch, in an order that depends on `seed`.

    The last batch of an epoch is filled from the next one. Subclasses change the order, adapt to the rewards
    (`observe`), or let prompts share a baseline (`baseline_groups`).
    """

    reads_texts = False  # whether groups are formed by the texts of completions

    def __init__(self, dataset: Sequence[Prompt], batch_size: int, seed: int = 0) -> None:
        """Raise ValueError for a batch size below 1 or above the size of the dataset."""
        if not 1 <= batch_size <= len(dataset):
            problem = f"a batch of {batch_size} prompts cannot be sampled from a dataset of {len(dataset)}"
            raise ValueError(f"{problem}: set prompts_per_step from 1 to the size of the dataset")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.drawn = 0  # prompts since the start
        self._digest = _dataset_digest(dataset)
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> list[Prompt]:
        batch = [self._at(self.drawn + offset) for offset in range(self.batch_size)]
        self.drawn += self.batch_size
        return batch

    def begin(self, step: int, total_steps: int) -> None:
        """Set the step of the run, before its prompts are sampled."""

    def baseline_groups(self, prompts: Sequence[Prompt], table: CompletionTable | None) -> list[int] | None:
        """Return a number for each prompt, equal if they share a baseline; None: no two do."""
        return None

    def observe(self, prompts: Sequence[Prompt], rewards: Tensor, table: Tensor) -> None:
        """Adapt to the rewards of G prompts: totals (G, n), and (G, n, F) by function; NaN: no reward."""

    def metrics(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], table: CompletionTable | None
    ) -> dict[str, float]:
        """Return metrics of a step's prompts, their `baseline_groups` and scored completions, if known."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return a state for JSON; after `load_state_dict` the same prompts follow."""
        return {"drawn": self.drawn, "seed": self.seed, "dataset": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError for the state of another dataset or seed."""
        if state["seed"] != self.seed:
            seeds = f"has seed {state['seed']}, this run {self.seed}"
            raise ValueError(f"the saved prompt order {seeds}: keep the seed")
        if state["dataset"] != self._digest:
            remedy = "resume with the dataset, tokenizer and prompt settings of the run"
            raise ValueError(f"the saved prompt order belongs to other prompts than this run has: {remedy}")
        self.drawn = state["drawn"]

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._epoch = epoch
        return self.dataset[self._order[place]]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.dataset)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def _dataset_digest(dataset: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in dataset:
        digest.update(repr((prompt.index, prompt.token_ids)).encode())
    return digest.hexdigest()[:32]
