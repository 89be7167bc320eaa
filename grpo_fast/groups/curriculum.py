"""Prompts drawn by difficulty, which is measured by each prompt's running pass rate."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grpo_fast.config.groups import CurriculumConfig
from grpo_fast.config.lookup import choices
from grpo_fast.data import Prompt, PromptSampler

if TYPE_CHECKING:
    from torch import Tensor


class DifficultySampler(PromptSampler):
    """Fills each batch from buckets of pass rates, a bucket's share being its weight's.

    Within a bucket those drawn least often come first. All weights are positive, so every prompt comes again
    and an outdated pass rate is measured anew. A bucket with fewer prompts than its share gives the
    rest to the others; no prompt comes twice in a batch.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        batch_size: int,
        config: CurriculumConfig,
        reward_names: Sequence[str],
        seed: int,
    ) -> None:
        """Raises ValueError for a batch larger than the dataset, a reward or column that is not there."""
        super().__init__(dataset, batch_size, seed)
        if config.reward is not None and config.reward not in reward_names:
            raise ValueError(
                f"curriculum.reward = {config.reward!r} is no reward of this run: "
                f"{choices(config.reward, reward_names)}"
            )
        self.config = config
        self._column = None if config.reward is None else list(reward_names).index(config.reward)
        self._position_of = {prompt.index: position for position, prompt in enumerate(dataset)}
        self.pass_rates = [_initial(prompt, config) for prompt in dataset]
        self.draws = [0] * len(dataset)

    def next(self) -> list[Prompt]:
        rng = random.Random(f"{self.seed}/{self.drawn}")
        buckets = self.buckets()
        sizes = [len(bucket) for bucket in buckets]
        quotas = _quotas(sizes, self.config.bucket_weights, self.batch_size, rng.random())
        chosen = []
        for bucket, quota in zip(buckets, quotas, strict=True):
            rng.shuffle(bucket)
            chosen += sorted(bucket, key=self.draws.__getitem__)[:quota]
        rng.shuffle(chosen)
        for position in chosen:
            self.draws[position] += 1
        self.drawn += self.batch_size
        return [self.dataset[position] for position in chosen]

    def buckets(self) -> list[list[int]]:
        """Positions in each bucket, hardest first; a rate on an edge belongs to the easier side."""
        buckets: list[list[int]] = [[] for _ in self.config.bucket_weights]
        for position, rate in enumerate(self.pass_rates):
            buckets[bisect_right(self.config.bucket_edges, rate)].append(position)
        return buckets

    def observe(self, prompts: Sequence[Prompt], rewards: Tensor, table: Tensor) -> None:
        """Move the prompts' running pass rates towards what they earned."""
        deciding = rewards if self._column is None else table[..., self._column]
        for prompt, scores in zip(prompts, deciding.tolist(), strict=True):
            scored = [score for score in scores if score == score]
            if not scored:
                continue
            # Rewards went through fp32 and the threshold did not.
            passed = sum(score >= self.config.threshold - 1e-6 for score in scored) / len(scored)
            position = self._position_of[prompt.index]
            self.pass_rates[position] += self.config.smoothing * (passed - self.pass_rates[position])

    def metrics(self, *_: object) -> dict[str, float]:
        """Mean running pass rate of the dataset, and the share of it in each bucket."""
        sizes = [len(bucket) for bucket in self.buckets()]
        shares = {f"curriculum/bucket_{i}": size / len(self.dataset) for i, size in enumerate(sizes)}
        return {"curriculum/pass_rate": sum(self.pass_rates) / len(self.pass_rates)} | shares

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"pass_rates": list(self.pass_rates), "draws": list(self.draws)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.pass_rates, self.draws = list(state["pass_rates"]), list(state["draws"])


def _initial(prompt: Prompt, config: CurriculumConfig) -> float:
    name = config.pass_rate_column
    if name is None:
        return config.initial_pass_rate
    if name not in prompt.columns:
        raise ValueError(
            f"curriculum.pass_rate_column = {name!r} is no column of the dataset: "
            f"{choices(name, prompt.columns)}"
        )
    value = prompt.columns[name]
    if value is None:
        return config.initial_pass_rate
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"curriculum.pass_rate_column = {name!r} holds {value!r} in row {prompt.index}; a pass rate lies "
            "between 0 and 1, and null means unknown"
        )
    return float(value)


def _quotas(sizes: Sequence[int], weights: Sequence[float], total: int, offset: float) -> list[int]:
    """Whole numbers that add up to `total`, none above its size, in proportion to the weights on average.

    Systematic sampling: `offset` in [0, 1) decides which way each fraction goes, so a small share comes true
    over many batches and is never rounded away for good. Fractions are exact: a whole share stays whole.
    """
    reached, bounds = Fraction(0), [0]
    for share in _shares(sizes, weights, total):
        reached += share
        bounds.append(math.ceil(reached - Fraction(offset)))  # how many of offset, offset + 1, ... lie below
    return [after - before for before, after in itertools.pairwise(bounds)]


def _shares(sizes: Sequence[int], weights: Sequence[float], total: int) -> list[Fraction]:
    """`total` parted by weight, none above its size; what one cannot take the others share."""
    shares = [Fraction(0)] * len(sizes)
    left, weight = Fraction(total), sum(map(Fraction, weights))
    # Those with the least room for their weight first: what they leave is still to be parted.
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i] / weights[i]):
        own = Fraction(weights[i])
        shares[i] = min(left * own / weight, Fraction(sizes[i]))
        left, weight = left - shares[i], weight - own
    return shares
