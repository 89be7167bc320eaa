"""Which prompts come next: endless shuffled epochs, exact after a resume."""

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
    """Draws batches of prompts, each prompt once an epoch, in an order that `seed` decides.

    The last batch of an epoch is filled from the next one. Other samplers change the order, learn from the
    rewards (`observe`), or let prompts share a baseline (`baseline_groups`).
    """

    reads_texts = False  # whether groups are formed by the texts of completions

    def __init__(self, dataset: Sequence[Prompt], batch_size: int, seed: int = 0) -> None:
        """Raises ValueError for a batch size that is not positive, or larger than the dataset."""
        if not 1 <= batch_size <= len(dataset):
            raise ValueError(
                f"a batch of {batch_size} prompts cannot be drawn from a dataset of {len(dataset)}: "
                "set prompts_per_step to at least 1 and at most the size of the dataset"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.drawn = 0  # prompts since the start
        self._digest = _dataset_digest(dataset)
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> list[Prompt]:
        """The next `batch_size` prompts."""
        batch = [self._at(self.drawn + offset) for offset in range(self.batch_size)]
        self.drawn += self.batch_size
        return batch

    def begin(self, step: int, total_steps: int) -> None:
        """Go to a step of the run, before its prompts are sampled."""

    def baseline_groups(self, prompts: Sequence[Prompt], table: CompletionTable | None) -> list[int] | None:
        """For each prompt of a batch a number, the same where they share a baseline. None: no two do."""
        return None

    def observe(self, prompts: Sequence[Prompt], rewards: Tensor, table: Tensor) -> None:
        """What a batch of G prompts earned: totals (G, n), and (G, n, F) by function; NaN: not scored."""

    def metrics(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], table: CompletionTable | None
    ) -> dict[str, float]:
        """Figures of a step's prompts that only the sampler knows.

        Args:
            numbers: of `baseline_groups`; empty where no prompts share a baseline.
            table: their scored completions, where they are known.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the same prompts follow after `load_state_dict`."""
        return {"drawn": self.drawn, "seed": self.seed, "dataset": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state is of another dataset or seed."""
        if state["seed"] != self.seed:
            raise ValueError(
                f"the saved prompt order has seed {state['seed']}, this run {self.seed}: keep the seed"
            )
        if state["dataset"] != self._digest:
            raise ValueError(
                "the saved prompt order belongs to other prompts than this run has: resume with the dataset, "
                "tokenizer and prompt settings it was started with"
            )
        self.drawn = state["drawn"]

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.dataset))
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._epoch = epoch
        return self.dataset[self._order[place]]

    def _order_of(self, epoch: int) -> list[int]:
        """Every position of the dataset once."""
        order = list(range(len(self.dataset)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def _dataset_digest(dataset: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in dataset:
        digest.update(repr((prompt.index, prompt.token_ids)).encode())
    return digest.hexdigest()[:32]
