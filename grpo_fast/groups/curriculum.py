"""Sample prompts by difficulty, measured by each prompt's running pass rate."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.config.groups import CurriculumConfig
from grpo_fast.config.lookup import choices
from grpo_fast.data import Prompt, PromptSampler

if TYPE_CHECKING:
    from torch import Tensor


class DifficultySampler(PromptSampler):
    """Sample each prompt of a batch from a bucket of pass rates, which is chosen by its weight.

    Within a bucket, prompts that were sampled least often come first. All weights are positive, so every
    prompt comes again and its pass rate is updated. No prompt comes twice in a batch: an empty bucket leaves
    its share to the others.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        batch_size: int,
        config: CurriculumConfig,
        reward_names: Sequence[str],
        seed: int,
    ) -> None:
        """Raise ValueError for a batch larger than the dataset, or an unknown reward or column."""
        super().__init__(dataset, batch_size, seed)
        if config.reward is not None and config.reward not in reward_names:
            known = choices(config.reward, reward_names)
            raise ValueError(f"curriculum.reward = {config.reward!r} is no reward of this run: {known}")
        self.config = config
        self._column = None if config.reward is None else list(reward_names).index(config.reward)
        self._position_of = {prompt.index: position for position, prompt in enumerate(dataset)}
        self.pass_rates = [_initial(prompt, config) for prompt in dataset]
        self.draws = [0] * len(dataset)

    def next(self) -> list[Prompt]:
        rng = random.Random(f"{self.seed}/{self.drawn}")
        buckets = self.buckets()
        for bucket in buckets:
            rng.shuffle(bucket)
            bucket.sort(key=self.draws.__getitem__, reverse=True)  # the least sampled is last
        chosen = []
        for _ in range(self.batch_size):
            filled = [own for own in zip(buckets, self.config.bucket_weights, strict=True) if own[0]]
            (bucket,) = rng.choices([bucket for bucket, _ in filled], [weight for _, weight in filled])
            chosen.append(bucket.pop())
        for position in chosen:
            self.draws[position] += 1
        self.drawn += self.batch_size
        return [self.dataset[position] for position in chosen]

    def buckets(self) -> list[list[int]]:
        """Return the positions in each bucket, hardest first; a rate on an edge is in the easier bucket."""
        buckets: list[list[int]] = [[] for _ in self.config.bucket_weights]
        for position, rate in enumerate(self.pass_rates):
            buckets[bisect_right(self.config.bucket_edges, rate)].append(position)
        return buckets

    def observe(self, prompts: Sequence[Prompt], rewards: Tensor, table: Tensor) -> None:
        deciding = rewards if self._column is None else table[..., self._column]
        for prompt, scores in zip(prompts, deciding.tolist(), strict=True):
            scored = [score for score in scores if score == score]
            if not scored:
                continue
            # Rewards are float32, the threshold is not.
            passed = sum(score >= self.config.threshold - 1e-6 for score in scored) / len(scored)
            position = self._position_of[prompt.index]
            self.pass_rates[position] += self.config.smoothing * (passed - self.pass_rates[position])

    def metrics(self, *_: object) -> dict[str, float]:
        """Return the mean pass rate of the dataset, and the share of prompts in each bucket."""
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
        known = choices(name, prompt.columns)
        raise ValueError(f"curriculum.pass_rate_column = {name!r} is no column of the dataset: {known}")
    value = prompt.columns[name]
    if value is None:
        return config.initial_pass_rate
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        problem = f"curriculum.pass_rate_column = {name!r} has {value!r} in row {prompt.index}"
        raise ValueError(f"{problem}; a pass rate is from 0 to 1, or null if unknown")
    return float(value)
