"""One step's experience: prompts in, groups of scored completions out, samples for the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.config import AdvantageConfig
from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import Advantages, decoupled_advantages, group_advantages, weighted_sum
from grpo_fast.groups.quality import length_reward_correlation
from grpo_fast.objective.types import StepTotals
from grpo_fast.policy.packing import Sample
from grpo_fast.rewards import RewardSet
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
) -> list[Group]:
    """Rewards and advantages of G prompts with n completions each.

    Args:
        weights: of the F reward functions in place of their own.
        shared: for each prompt a number, the same where they share a baseline; None: nobody does.
    """
    n = len(completions[0])
    result = rewards.score_completions(prompts, completions)
    totals = result.total if weights is None else weighted_sum(result.table, weights)
    totals = totals.view(len(prompts), n)
    table = result.table.view(len(prompts), n, -1)
    scored = compare(totals, table, weights or rewards.weights, config, shared)
    return [
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


def make_samples(groups: Sequence[Group], config: AdvantageConfig) -> tuple[list[Sample], StepTotals]:
    """What the update computes, and the counts that its loss is divided by.

    Groups without spread have no policy gradient. They leave the samples but stay in the counts, so
    that skipping them changes the cost of a step and not its gradient.
    """
    samples: list[Sample] = []
    num_tokens = num_sequences = 0
    for group_id, group in enumerate(groups):
        for completion, advantages in zip(group.completions, group.advantages, strict=True):
            masked = config.mask_truncated and completion.truncated
            num_sequences += 1
            num_tokens += 0 if masked else len(completion.token_ids)
            if masked or (group.flat and config.skip_flat_groups):
                continue
            samples.append(
                Sample(
                    prompt_ids=group.prompt.token_ids,
                    completion_ids=completion.token_ids,
                    advantages=advantages,
                    group_id=group_id,
                    loss_mask=(True,) * len(completion.token_ids),
                    sampler_logprobs=completion.logprobs,
                )
            )
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
