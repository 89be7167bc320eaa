"""How a dataset is grouped, for a person to read before training."""

from __future__ import annotations

from collections import Counter

from grpo_fast.data import PromptDataset
from grpo_fast.groups.config import GroupConfig
from grpo_fast.groups.criteria import text_of
from grpo_fast.groups.formation import Grouping, form_groups
from grpo_fast.groups.sampler import GroupSampler

WIDTH = 100  # characters of an example


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
        return "\n".join(
            [
                *lines,
                f"each prompt's {num_generations} completions are compared with each other and with no "
                "others",
            ]
        )
    example_turns = 2 * len(dataset.config.examples)
    grouping = form_groups(dataset, config, example_turns=example_turns)
    lines += [*_sizes(grouping), *_batches(GroupSampler(dataset, prompts_per_step, grouping, seed))]
    largest = sorted(grouping.members, key=len, reverse=True)
    for group in (group for group in largest[:examples] if len(group) > 1):
        spread = grouping.spread(group)
        likeness = "" if spread is None else f", mean similarity {1 - spread:.2f}"
        lines.append(f"group of {len(group)} prompts, {len(group) * num_generations} completions{likeness}")
        lines += [f"  | {_short(text_of(dataset[position], example_turns))}" for position in group]
    return "\n".join(lines)


def _sizes(grouping: Grouping) -> list[str]:
    sizes = Counter(len(group) for group in grouping.members)
    together = sum(size * count for size, count in sizes.items() if size > 1)
    share = _percent(together, len(grouping.rows))
    lines = [f"{len(grouping.members)} groups; {share} of the prompts are in company"]
    lines += [f"  {count} of size {size}" for size, count in sorted(sizes.items())]
    spreads = [spread for group in grouping.members if (spread := grouping.spread(group)) is not None]
    if spreads:
        lines.append(f"mean similarity within groups {1 - sum(spreads) / len(spreads):.2f}")
        lines.append(f"mean similarity of any two prompts {1 - _overall(grouping):.2f}")
    return lines


def _overall(grouping: Grouping, limit: int = 1000) -> float:
    """Mean distance between any two prompts, of at most `limit` spread evenly over the dataset."""
    step = -(-len(grouping.rows) // limit)
    return grouping.spread(range(0, len(grouping.rows), step)) or 0.0


def _batches(sampler: GroupSampler) -> list[str]:
    """What of it comes true in the first epoch: a batch that ends within a group parts it."""
    batches = max(1, len(sampler.dataset) // sampler.batch_size)
    metrics = [sampler.metrics(sampler.next()) for _ in range(batches)]
    sharing = sum(m["groups/sharing"] for m in metrics) / batches
    size = sum(m["groups/prompts_per_baseline"] for m in metrics) / batches
    return [
        f"in steps of {sampler.batch_size} prompts {_percent(sharing, 1)} share a baseline, "
        f"{size:.2f} prompts on average"
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
