"""One step's experience: completions drawn and scored, groups compared, samples for the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import decoupled_advantages, group_advantages, length_reward_correlation
from grpo_fast.groups.config import AdvantageConfig
from grpo_fast.lookup import load_callable
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.policy.packing import Sample
from grpo_fast.rewards import EarlyScores, RewardSet, weighted_sum
from grpo_fast.rewards.builtins import BUILTINS
from grpo_fast.rollout.types import Completion, Engine, Rollout, Sampling, as_asked, generate_rollout

Progress = Callable[[int, int, int], None]  # tokens decoded, completions ended, completions in all
Advantage = float | tuple[float, ...]  # of a completion, or of each of its tokens


@dataclass(frozen=True)
class Group:
    """A prompt, its n completions, and what they earned from F reward functions."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Tensor  # (n,) float32, the weighted total
    reward_table: Tensor  # (n, F) float32, NaN where a function does not apply
    advantages: tuple[Advantage, ...] = ()  # one for each completion, once the groups are compared
    flat: bool = False  # all rewards equal: nothing to learn
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns that rewards logged, n values
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of its batch, by the first group


@dataclass
class RolloutWatch:
    """Beside a rollout: rewards of complete groups, and the display."""

    on_progress: Progress | None = None
    scores: EarlyScores | None = None

    def group_done(self, index: int, completions: list[Completion]) -> None:
        if self.scores is not None:
            self.scores.group_done(index, completions)

    def progress(self, tokens: int, finished: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(tokens, finished, total)


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    rewards: RewardSet,
    *,
    rollout: Rollout = generate_rollout,
    progress: Progress | None = None,
) -> tuple[list[list[Completion]], EarlyScores]:
    """`n` completions of each prompt, and the rewards that were begun meanwhile."""
    scores = EarlyScores(rewards, prompts)
    watch = RolloutWatch(progress, scores)
    watch.progress(0, 0, n * len(prompts))  # the prefill counts
    try:
        return rollout(engine, prompts, n, sampling, observer=watch), scores
    except BaseException:
        scores.cancel()
        raise


def score(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    rewards: RewardSet,
    *,
    weights: Sequence[float] | None = None,
    precomputed: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> list[Group]:
    """What G prompts with n completions each earned; their environments have then done their part.

    Args:
        weights: of the F reward functions in place of their own.
        precomputed: values of reward functions that have been called already, by name.
    """
    n = len(completions[0])
    result = rewards.score_completions(prompts, completions, precomputed=precomputed)
    totals = result.total if weights is None else weighted_sum(result.table, weights)
    per_prompt = zip(prompts, completions, totals.split(n), result.table.split(n), strict=True)
    scored = [
        Group(
            prompt,
            tuple(completion.without_environment() for completion in group),
            total,
            table,
            extra={name: values[n * place : n * (place + 1)] for name, values in result.log.extra.items()},
        )
        for place, (prompt, group, total, table) in enumerate(per_prompt)
    ]
    return [replace(scored[0], logged=result.log.metrics), *scored[1:]]


def compare(
    groups: Sequence[Group],
    config: AdvantageConfig,
    weights: Sequence[float],
    baseline_groups: Sequence[int] | None = None,
) -> list[Group]:
    """The groups with the advantages of their completions.

    Args:
        weights: of the F reward functions; read where each reward is scaled by itself.
        baseline_groups: for each prompt a number, the same where they share a baseline; None: nobody does.

    Raises:
        ValueError: the configured advantage function returns something of the wrong shape.
    """
    totals = torch.stack([group.rewards for group in groups])
    if config.multi_objective_aggregation == "normalize_then_sum":
        table = torch.stack([group.reward_table for group in groups])
        found = decoupled_advantages(table, weights, baseline_groups=baseline_groups)
    else:
        found = group_advantages(
            totals,
            scale_rewards=config.scale_rewards,
            baseline=config.baseline,
            baseline_groups=baseline_groups,
            lengths=torch.tensor([[c.num_sampled for c in group.completions] for group in groups]),
        )
    advantages = found.advantages
    if config.rescale_flat_groups:
        advantages = advantages * (len(groups) / max(1, int((~found.flat).sum())))
    rows = zip(groups, advantages.tolist(), found.flat.tolist(), strict=True)
    compared = [replace(group, advantages=tuple(row), flat=flat) for group, row, flat in rows]
    return compared if config.function is None else own_advantages(compared, totals, config.function)


def own_advantages(groups: Sequence[Group], rewards: Tensor, path: str) -> list[Group]:
    """The groups with the advantages that a user's function gives them; flat where all are zero."""
    given = load_callable(path, "advantage.function")(list(groups), rewards)
    if len(given) != len(groups):
        raise ValueError(f"advantage.function = {path!r} returned {len(given)} groups for {len(groups)}")
    own = []
    for group, row in zip(groups, given, strict=True):
        values = tuple(tuple(map(float, a)) if isinstance(a, (list, tuple)) else float(a) for a in row)
        lengths = [len(completion.token_ids) for completion in group.completions]
        found = [len(a) if isinstance(a, tuple) else n for a, n in zip(values, lengths, strict=False)]
        if len(values) != len(lengths) or found != lengths:
            raise ValueError(
                f"advantage.function = {path!r} returned {found} values for completions of {lengths} tokens; "
                "give each completion a number, or a list with one for each of its tokens"
            )
        flat = not any(any(a) if isinstance(a, tuple) else a for a in values)
        own.append(replace(group, advantages=values, flat=flat))
    return own


def penalized(groups: Sequence[Group], penalties: Tensor) -> list[Group]:
    """The groups with `penalties` (G, n) taken from their rewards."""
    pairs = zip(groups, penalties, strict=True)
    return [replace(group, rewards=group.rewards - row.to(group.rewards)) for group, row in pairs]


def overlong_penalties(groups: Sequence[Group], limit: int, share: float) -> Tensor:
    """(G, n) DAPO's soft punishment: rises from 0 to 1 over the last `share` of the `limit` in tokens."""
    punish = BUILTINS["soft_overlong"](max_length=limit, cache=max(1, round(share * limit)))
    ids = [[completion.token_ids for completion in group.completions] for group in groups]
    return -torch.tensor([punish([], completion_ids=row) for row in ids])


def bare_samples(groups: Sequence[Group]) -> list[Sample]:
    """Every completion, only to be scored by a model."""
    return [_sample(g, group, c, 0.0) for g, group in enumerate(groups) for c in group.completions]


def _sample(group_id: int, group: Group, completion: Completion, advantage: Advantage) -> Sample:
    episode = completion.episode
    return Sample(
        prompt_ids=as_asked(group.prompt, completion).token_ids,
        completion_ids=completion.token_ids,
        advantage=advantage,
        group_id=group_id,
        sampler_logprobs=completion.logprobs,
        sampled=None if episode is None else episode.sampled,
    )


def make_samples(
    groups: Sequence[Group], config: AdvantageConfig, loss: GRPOLossConfig
) -> tuple[list[Sample], StepTotals]:
    """The update's samples, and the counts that its loss is divided by.

    A group without spread has no policy gradient. Where it is skipped it leaves the samples but stays in the
    counts, so that the policy gradient is the same; terms that act on every token, a KL in the loss or an
    entropy bonus, then act on the other groups only.
    """
    skips = config.skip_flat_groups
    if skips is None:  # whitened, a flat group's advantages are not zero
        skips = not loss.reads_every_token and config.scale_rewards != "whiten"
    samples: list[Sample] = []
    num_tokens = num_sequences = 0
    for group_id, group in enumerate(groups):
        for completion, advantage in zip(group.completions, group.advantages, strict=True):
            masked = config.mask_truncated and completion.truncated
            num_sequences += 1
            num_tokens += 0 if masked else completion.num_sampled
            if masked or (group.flat and skips):
                continue
            samples.append(_sample(group_id, group, completion, advantage))
    return samples, StepTotals(num_tokens=num_tokens, num_sequences=num_sequences)


def describe(groups: Sequence[Group], reward_names: Sequence[str]) -> dict[str, float]:
    """Metrics of a step's groups."""
    rewards = torch.cat([group.rewards for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([completion.num_sampled for completion in completions], dtype=torch.float32)
    unique = [
        (len({c.token_ids for c in group.completions}) - 1) / (len(group.completions) - 1) for group in groups
    ]
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
    for name in dict.fromkeys(name for group in groups for name in group.logged):
        metrics[f"logged/{name}"] = fmean(v for group in groups for v in group.logged.get(name, ()))
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    if episodes:
        calls = sum(episode.tool_calls for episode in episodes)
        metrics["turns/mean"] = sum(episode.turns for episode in episodes) / len(episodes)
        metrics["tools/calls"] = calls / len(episodes)
        metrics["tools/failures"] = sum(episode.tool_failures for episode in episodes) / max(1, calls)
        metrics["tools/given_up"] = sum(episode.tools_given_up for episode in episodes) / max(1, calls)
    return metrics
