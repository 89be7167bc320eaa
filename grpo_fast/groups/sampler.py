"""Which prompts a step draws together, and a report of it for a person to read before training."""

from __future__ import annotations

import random
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from grpo_fast.data import Prompt, PromptDataset, PromptSampler
from grpo_fast.data.types import own_text
from grpo_fast.groups.config import CurriculumConfig, GroupConfig
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import Grouping, form_groups

WIDTH = 100  # characters of a described prompt
COMPARED = 1000  # prompts in the mean similarity of any two


class GroupSampler(PromptSampler):
    """Shuffled epochs in which the prompts of a group follow each other, so that a batch has them together.

    Every prompt still comes once an epoch. Where a batch ends within a group, its parts share what they can.
    """

    def __init__(self, dataset: Sequence[Prompt], batch_size: int, grouping: Grouping, seed: int = 0) -> None:
        super().__init__(dataset, batch_size, seed)
        self.grouping = grouping

    def baseline_groups(self, prompts: Sequence[Prompt]) -> list[int]:
        return self.grouping.baseline_groups(prompts)

    def metrics(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Share of prompts that share a baseline, prompts a baseline, the distance of those that share."""
        groups: dict[int, list[int]] = {}
        for prompt, baseline in zip(prompts, self.baseline_groups(prompts), strict=True):
            groups.setdefault(baseline, []).append(self.grouping.position_of[prompt.index])
        metrics = {
            "groups/sharing": sum(len(group) for group in groups.values() if len(group) > 1) / len(prompts),
            "groups/prompts_per_baseline": len(prompts) / len(groups),
        }
        spreads = [spread for group in groups.values() if (spread := self.grouping.spread(group)) is not None]
        return metrics | ({"groups/embedding_spread": fmean(spreads)} if spreads else {})

    def state_dict(self) -> dict[str, Any]:
        # The groups themselves: another machine's rounding may form others.
        return super().state_dict() | {"groups": [list(group) for group in self.grouping.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.grouping = replace(self.grouping, members=tuple(map(tuple, state["groups"])))
        self._epoch = -1

    def _order_of(self, epoch: int) -> list[int]:
        rng = random.Random(f"{self.seed}/{epoch}")
        groups = [list(group) for group in self.grouping.members]
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        return [position for group in groups for position in group]


def make_sampler(
    dataset: PromptDataset,
    batch_size: int,
    groups: GroupConfig,
    curriculum: CurriculumConfig | None,
    reward_names: Sequence[str],
    *,
    seed: int,
) -> PromptSampler:
    """The sampler that `groups` and `curriculum` ask for.

    Raises:
        ValueError: settings that don't fit the dataset or the rewards.
    """
    if curriculum is not None:
        return DifficultySampler(dataset, batch_size, curriculum, reward_names, seed)
    if groups.shares_baselines:
        grouping = form_groups(dataset, groups, example_turns=2 * len(dataset.config.examples))
        return GroupSampler(dataset, batch_size, grouping, seed)
    return PromptSampler(dataset, batch_size, seed)


def describe_groups(
    dataset: PromptDataset,
    config: GroupConfig,
    *,
    num_generations: int,
    prompts_per_step: int,
    seed: int = 0,
    examples: int = 3,
) -> str:
    """Sizes, likeness and examples of the groups that a configuration makes of its dataset.

    Raises:
        ValueError: a strategy that does not fit the dataset.
    """
    lines = [f"{len(dataset)} prompts of {dataset.config.source}, strategy {config.strategy}"]
    if not config.shares_baselines:
        alone = f"each prompt's {num_generations} completions are compared with each other and with no others"
        return f"{lines[0]}\n{alone}"
    example_turns = 2 * len(dataset.config.examples)
    grouping = form_groups(dataset, config, example_turns=example_turns)
    lines += [*_sizes(grouping), _batches(GroupSampler(dataset, prompts_per_step, grouping, seed))]
    largest = sorted(grouping.members, key=len, reverse=True)
    for group in (group for group in largest[:examples] if len(group) > 1):
        spread = grouping.spread(group)
        likeness = "" if spread is None else f", mean similarity {1 - spread:.2f}"
        lines.append(f"group of {len(group)} prompts, {len(group) * num_generations} completions{likeness}")
        texts = (own_text(dataset[position], example_turns) for position in group)
        lines += [f"  | {textwrap.shorten(text, WIDTH, placeholder='...')}" for text in texts]
    return "\n".join(lines)


def _sizes(grouping: Grouping) -> list[str]:
    sizes = Counter(map(len, grouping.members))
    share = 1 - sizes[1] / len(grouping.rows)
    lines = [f"{len(grouping.members)} groups; {100 * share:.1f} % of the prompts share one with others"]
    lines += [f"  {count} of size {size}" for size, count in sorted(sizes.items())]
    spreads = [spread for group in grouping.members if (spread := grouping.spread(group)) is not None]
    if spreads:
        # Of prompts spread evenly over the dataset: all pairs would be too many.
        overall = grouping.spread(range(0, len(grouping.rows), -(-len(grouping.rows) // COMPARED))) or 0.0
        lines.append(f"mean similarity within groups {1 - fmean(spreads):.2f}")
        lines.append(f"mean similarity of any two prompts {1 - overall:.2f}")
    return lines


def _batches(sampler: GroupSampler) -> str:
    """What the batches of the first epoch share: one that ends within a group parts it."""
    batches = range(len(sampler.dataset) // sampler.batch_size)
    metrics = [sampler.metrics(sampler.next()) for _ in batches]
    sharing = 100 * fmean(m["groups/sharing"] for m in metrics)
    size = fmean(m["groups/prompts_per_baseline"] for m in metrics)
    return (
        f"in steps of {sampler.batch_size} prompts {sharing:.1f} % share a baseline, {size:.2f} prompts on "
        "average"
    )
