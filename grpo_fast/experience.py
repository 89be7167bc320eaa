"""One step's experience: prompts in, groups of scored completions out, samples for the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import (
    Advantages,
    decoupled_advantages,
    group_advantages,
    length_reward_correlation,
)
from grpo_fast.groups.config import AdvantageConfig
from grpo_fast.lookup import load_callable
from grpo_fast.objective.types import StepTotals
from grpo_fast.policy.packing import Sample
from grpo_fast.rewards import RewardSet
from grpo_fast.rewards.reward_set import NOTHING_KNOWN
from grpo_fast.rewards.types import weighted_sum
from grpo_fast.rollout.types import Completion


@dataclass(frozen=True)
class Group:
    """A prompt, its n completions, and what they earned. F reward functions."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Tensor  # (n,) float32, the weighted total
    reward_table: Tensor  # (n, F) float32, NaN where a function does not apply
    advantages: tuple[tuple[float, ...], ...]  # one float a token, for each completion
    flat: bool  # all rewards equal: nothing to learn


def score_groups(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    rewards: RewardSet,
    config: AdvantageConfig,
    *,
    weights: Sequence[float] | None = None,
    shared: Sequence[int] | None = None,
    penalties: Tensor | None = None,
    known: Mapping[str, Sequence[float]] = NOTHING_KNOWN,
) -> list[Group]:
    """Rewards and advantages of G prompts with n completions each.

    Args:
        weights: of the F reward functions in place of their own.
        shared: for each prompt a number, the same where they share a baseline; None: nobody does.
        penalties: (G, n), taken from the total rewards.
        known: values of reward functions that have been called already, by name.

    Raises:
        ValueError: the configured advantage function returns something of the wrong shape.
    """
    n = len(completions[0])
    result = rewards.score_completions(prompts, completions, known=known)
    totals = result.total if weights is None else weighted_sum(result.table, weights)
    totals = totals.view(len(prompts), n)
    if penalties is not None:
        totals = totals - penalties.to(totals)
    table = result.table.view(len(prompts), n, -1)
    scored = compare(totals, table, weights or rewards.weights, config, shared)
    groups = [
        Group(
            prompt=prompt,
            completions=tuple(group),
            rewards=totals[g],
            reward_table=table[g],
            advantages=tuple(
                (advantage,) * len(completion.token_ids)
                for advantage, completion in zip(scored.advantages[g].tolist(), group, strict=True)
            ),
            flat=bool(scored.flat[g]),
        )
        for g, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
    ]
    return groups if config.function is None else own_advantages(groups, totals, config.function)


def own_advantages(groups: Sequence[Group], rewards: Tensor, path: str) -> list[Group]:
    """The groups with the advantages that a user's function gives them; flat where all are zero."""
    given = load_callable(path, "advantage.function")(list(groups), rewards)
    if len(given) != len(groups):
        raise ValueError(f"advantage.function = {path!r} returned {len(given)} groups for {len(groups)}")
    return [
        replace(group, advantages=rows, flat=not any(map(any, rows)))
        for group, rows in (
            (group, _per_token(row, group, path)) for group, row in zip(groups, given, strict=True)
        )
    ]


def _per_token(
    row: Sequence[float | Sequence[float]], group: Group, path: str
) -> tuple[tuple[float, ...], ...]:
    lengths = [len(completion.token_ids) for completion in group.completions]
    tokens = [
        tuple(map(float, value)) if isinstance(value, (list, tuple)) else (float(value),) * length
        for value, length in zip(row, lengths, strict=False)
    ]
    if [len(values) for values in tokens] != lengths:
        raise ValueError(
            f"advantage.function = {path!r} returned {[len(values) for values in tokens]} values for "
            f"completions of {lengths} tokens; give each completion a number, or a list with one for each "
            "of its tokens"
        )
    return tuple(tokens)


def compare(
    totals: Tensor,
    table: Tensor,
    weights: Sequence[float],
    config: AdvantageConfig,
    shared: Sequence[int] | None,
) -> Advantages:
    """Advantages of rewards (G, n), or of their parts (G, n, F) where each is to be scaled by itself."""
    options = {"scale_rewards": config.scale_rewards, "baseline": config.baseline, "shared": shared}
    if config.multi_objective_aggregation == "normalize_then_sum":
        return decoupled_advantages(table, weights, **options)
    return group_advantages(totals, **options)


def bare_sample(prompt: Prompt, completion: Completion, group_id: int) -> Sample:
    """A completion that is only to be scored by a model."""
    return Sample(
        prompt_ids=prompt.token_ids,
        completion_ids=completion.token_ids,
        advantage=0.0,
        group_id=group_id,
        sampler_logprobs=completion.logprobs,
    )


def make_samples(groups: Sequence[Group], config: AdvantageConfig) -> tuple[list[Sample], StepTotals]:
    """What the update computes, and the counts that its loss is divided by.

    Groups without spread have no policy gradient. They leave the samples but stay in the counts, so
    that skipping them changes the cost of a step and not its policy gradient; terms that act on every
    token, a KL in the loss or an entropy bonus, then act on the other groups only.
    """
    samples: list[Sample] = []
    num_tokens = num_sequences = 0
    for group_id, group in enumerate(groups):
        for completion, advantage in zip(group.completions, group.advantages, strict=True):
            masked = config.mask_truncated and completion.truncated
            num_sequences += 1
            num_tokens += 0 if masked else len(completion.token_ids)
            if masked or (group.flat and config.skip_flat_groups):
                continue
            samples.append(replace(bare_sample(group.prompt, completion, group_id), advantage=advantage))
    return samples, StepTotals(num_tokens=num_tokens, num_sequences=num_sequences)


def describe(groups: Sequence[Group], reward_names: Sequence[str]) -> dict[str, float]:
    """Metrics of a step's groups."""
    rewards = torch.cat([group.rewards for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.float32)
    unique = [len({c.token_ids for c in group.completions}) / len(group.completions) for group in groups]
    metrics = {
        "reward/mean": rewards.nanmean().item(),
        "reward/std": torch.stack([group.rewards for group in groups]).std(1).nanmean().item(),
        "groups/flat": sum(group.flat for group in groups) / len(groups),
        "groups/unique_completions": sum(unique) / len(unique),
        "completion/length_mean": lengths.mean().item(),
        "completion/length_max": lengths.max().item(),
        "completion/truncated": sum(c.truncated for c in completions) / len(completions),
    }
    table = torch.cat([group.reward_table for group in groups])
    for name, column in zip(reward_names, table.unbind(1), strict=True):
        metrics[f"reward/{name}/mean"] = column.nanmean().item()
    correlation = length_reward_correlation(lengths.view(len(groups), -1), rewards.view(len(groups), -1))
    if correlation is not None:
        metrics["completion/length_reward_correlation"] = correlation
    return metrics
