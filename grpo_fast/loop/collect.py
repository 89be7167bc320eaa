"""Generate and score completions, and compute advantages, totals and metrics of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_fast.config.groups import AdvantageConfig
from grpo_fast.config.lookup import load_callable
from grpo_fast.data.table import BASELINE, EXPERTS, CompletionTable
from grpo_fast.data.types import Prompt
from grpo_fast.groups.advantages import (
    decoupled_advantages,
    group_advantages,
    length_reward_correlation,
    spread_within,
)
from grpo_fast.loop.columns import EXTRA, LOSS_COLUMN
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.objective.types import KNOWN_COLUMNS
from grpo_fast.rewards import EarlyScores, RewardSet, weighted_sum
from grpo_fast.rewards.types import Scored
from grpo_fast.rollout.types import Completion, Engine, Episode, Rollout, Sampling, as_asked, generate_rollout

T = TypeVar("T")
Progress = Callable[[int, int, int], None]  # tokens decoded, completions finished, completions in all
OVERLONG, KL = "soft_overlong", "kl"  # parts of the reward that training adds
EPISODE = ("turns", "tool_calls", "tool_failures", "tools_given_up", "environment_seconds")
"""Columns of the fact `episode` (S, 5); NaN for a completion of one turn without an environment."""


@dataclass(frozen=True)
class Group:
    """A prompt, its n completions and their F rewards, for a user's function."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Tensor  # (n,) float32, weighted sums
    reward_table: Tensor  # (n, F) float32, NaN where a function does not apply; then a column per penalty
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns that rewards logged, n values
    flat: bool = False  # all rewards are equal


@dataclass
class RolloutWatch:
    """Observes a rollout: starts to score complete groups, and reports progress."""

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
    """Generate `n` completions of each prompt, and score complete groups meanwhile."""
    scores = EarlyScores(rewards, prompts)
    watch = RolloutWatch(progress, scores)
    watch.progress(0, 0, n * len(prompts))  # during the prefill
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
    precomputed: Mapping[str, Scored] = MappingProxyType({}),
) -> CompletionTable:
    """Score G prompts with n completions each.

    Args:
        weights: replace those of the F reward functions.
        precomputed: values of reward functions that have been called already, by name.

    Returns:
        The table with the column `sampler_logprobs` and custom columns where the rollout has them; the facts
        `reward` (S,), `reward_table` (S, F; NaN where a function does not apply), `truncated` (S,) and
        `episode`; and the objects `prompt` (with an environment's opening) and `completion`.
    """
    result = rewards.score_completions(prompts, completions, precomputed=precomputed)
    flat = [completion.without_environment() for group in completions for completion in group]
    asked = [as_asked(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
    logprobs = _all_or_none("log-probabilities", [completion.logprobs for completion in flat])
    experts = _all_or_none("experts", [c.experts for group in completions for c in group])
    names = {frozenset(completion.columns) for completion in flat}
    if len(names) > 1:
        raise ValueError(f"the rollout's completions have different columns, {sorted(map(sorted, names))}")
    if taken := names.pop() & KNOWN_COLUMNS:
        raise ValueError(f"the rollout names columns {sorted(taken)}, which have a meaning here; rename them")
    table = CompletionTable.of(
        [prompt.token_ids for prompt in asked],
        [completion.token_ids for completion in flat],
        [number for number, group in enumerate(completions) for _ in group],
        mask=[None if c.episode is None else c.episode.sampled for c in flat],
        facts={
            "reward": weighted_sum(result.table, weights) if weights else result.total,
            "reward_table": result.table,
            "truncated": torch.tensor([completion.truncated for completion in flat]),
            "episode": torch.tensor(
                [_episode(completion.episode) for completion in flat], dtype=torch.float64
            ),
        },
        inputs={} if experts is None else {EXPERTS: experts},
        objects={
            "prompt": asked,
            "completion": flat,
            **{EXTRA + name: values for name, values in result.log.extra.items()},
        },
        sampler_logprobs=logprobs,
        **{name: [completion.columns[name] for completion in flat] for name in flat[0].columns},
    )
    logged = {n: torch.tensor(v, dtype=torch.float64) for n, v in result.log.metrics.items()}
    return replace(table, logged=logged)


def _all_or_none(what: str, values: Sequence[T | None]) -> list[T] | None:
    given = [value for value in values if value is not None]
    if given and len(given) < len(values):
        raise ValueError(f"{what} are None for some completions only; give them for all, or for none")
    return given or None


def _episode(episode: Episode | None) -> list[float]:
    return [math.nan if episode is None else float(getattr(episode, name)) for name in EPISODE]


def with_advantages(
    table: CompletionTable,
    config: AdvantageConfig,
    weights: Sequence[float],
    baseline_groups: Sequence[int] | None = None,
) -> CompletionTable:
    """Add the facts `advantage` (S,) and `flat` (S,), true where all rewards of the group are equal.

    Advantages per token of a user's function become the column `advantages`, and the fact is their mean.

    Args:
        weights: of the F reward functions; used where each reward is scaled separately.
        baseline_groups: a number for each group, equal where groups share a baseline; None: none do.
    """
    if config.scales_parts:
        by_group = table.facts["reward_table"].view(table.num_groups, -1, len(weights))
        found = decoupled_advantages(by_group, weights, baseline_groups=baseline_groups)
    else:
        found = group_advantages(
            rewards := table.by_group("reward"),
            scale_rewards=config.scale_rewards,
            baseline=config.baseline,
            baseline_groups=baseline_groups,
            lengths=table.num_targets.view(rewards.shape),
        )
    advantages = found.advantages
    if config.rescale_flat_groups:
        advantages = advantages * (len(advantages) / max(1, int((~found.flat).sum())))
    flat = found.flat.repeat_interleave(advantages.shape[1])
    if baseline_groups is not None:
        table = table.with_facts(**{BASELINE: torch.tensor([*baseline_groups])[table.groups]})
    compared = table.with_facts(advantage=advantages.flatten(), flat=flat)
    return compared if config.function is None else _own_advantages(compared, config.function)


def _own_advantages(table: CompletionTable, path: str) -> CompletionTable:
    """Add the advantages of a user's function; a group is flat where all of its advantages are zero."""
    rewards = table.by_group("reward")
    n = rewards.shape[1]
    given = load_callable(path, "advantage.function")(groups_of(table), rewards)
    if len(given) != len(rewards):
        raise ValueError(f"advantage.function = {path!r} returned {len(given)} groups for {len(rewards)}")
    tokens: list[float] = []
    for row, lengths in zip(given, table.lengths.view(-1, n).tolist(), strict=True):
        per_token = [
            [*a] if isinstance(a, (list, tuple)) else [a] * length
            for a, length in zip(row, lengths, strict=False)
        ]
        found = [len(values) for values in per_token]
        if len(row) != n or found != lengths:
            raise ValueError(
                f"advantage.function = {path!r} returned {found} values for completions of {lengths} tokens; "
                "give each completion a number, or a list with one for each of its tokens"
            )
        tokens += map(float, chain.from_iterable(per_token))
    column = torch.tensor(tokens)
    rows = table.spread(torch.arange(len(table)))
    means = torch.zeros(len(table)).index_add(0, rows, column) / table.lengths
    live = torch.zeros(len(table), dtype=torch.bool).index_fill(0, rows[column != 0], True)
    flat = ~live.view(-1, n).any(1).repeat_interleave(n)
    return table.with_columns(advantages=column).with_facts(advantage=means, flat=flat)


def groups_of(table: CompletionTable) -> list[Group]:
    """Return the table's groups for a user's function."""
    rewards = table.by_group("reward")
    parts = parts_of(table).view(*rewards.shape, -1)
    groups, n = [], rewards.shape[1]
    for number in range(len(rewards)):
        objects = {name: of[n * number : n * (number + 1)] for name, of in table.objects.items()}
        extra = {name.removeprefix(EXTRA): of for name, of in objects.items() if name.startswith(EXTRA)}
        flat = "flat" in table.facts and bool(table.facts["flat"][n * number])
        prompt, completions = objects["prompt"][0], objects["completion"]
        groups.append(Group(prompt, completions, rewards[number], parts[number], extra, flat))
    return groups


def overlong_penalties(table: CompletionTable, limit: int, share: float) -> Tensor:
    """Compute the (S,) soft length penalty, from 0 to 1 over the last `share` of `limit` tokens.

    DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13.
    """
    cache = max(1, round(share * limit))
    return ((table.lengths - (limit - cache)) / cache).clamp(0, 1)


def with_penalties(table: CompletionTable, penalties: Mapping[str, Tensor]) -> CompletionTable:
    """Subtract penalties (S,) from the reward, and add them negated as the fact `penalty_table` (S, P).

    Completions without a reward have no penalty.
    """
    if not penalties:
        return table
    reward = table.facts["reward"]
    parts = 0.0 - torch.stack([*penalties.values()], dim=1).where(reward.isfinite()[:, None], torch.nan)
    return table.with_facts(reward=reward + parts.sum(1), penalty_table=parts)


def parts_of(table: CompletionTable) -> Tensor:
    """Return (S, F + P): the rewards and penalties, whose weighted sum is the reward."""
    parts = [table.facts[name] for name in ("reward_table", "penalty_table") if name in table.facts]
    return torch.cat(parts, 1)


def part_weights(
    names: Sequence[str], weights: Sequence[float], penalties: Iterable[str]
) -> dict[str, float]:
    """Return the weight of each column of `parts_of`; penalties that share a reward's name are numbered."""
    parts = dict(zip(names, weights, strict=True))
    for penalty in penalties:
        taken = sum(re.fullmatch(rf"{penalty}(_\d+)?", name) is not None for name in parts)
        parts[f"{penalty}_{taken + 1}" if taken else penalty] = 1.0
    return parts


def to_train(
    table: CompletionTable, config: AdvantageConfig, loss: GRPOLossConfig
) -> tuple[CompletionTable, StepTotals]:
    """Return the update's completions with the column `advantages`, and the counts of its loss.

    Groups with zero reward variance have no policy gradient. Skipped groups still count, so that the policy
    gradient is the same; a KL in the loss or an entropy bonus then acts on the other groups only.
    """
    if not len(table):
        return table, StepTotals(num_tokens=0, num_sequences=0)
    skips = config.skip_flat_groups
    if skips is None:  # whitening gives flat groups advantages
        skips = not loss.reads_every_token and config.scale_rewards != "whiten"
    counted = ~(table.facts["truncated"] & config.mask_truncated)
    kept = counted & ~table.facts["flat"] if skips else counted
    totals = StepTotals(
        num_tokens=int(table.num_targets[counted].sum()),
        num_sequences=len(table),
        num_groups=len(table.compared.unique()),
    )
    chosen = table.select(kept.nonzero()[:, 0])
    if "advantages" not in chosen.columns:
        chosen = chosen.with_columns(advantages=chosen.spread(chosen.facts["advantage"]))
    if loss.is_custom:
        facts = {"rewards": chosen.facts["reward"]}
        asked = {name: chosen.facts.get(LOSS_COLUMN + name) for name in loss.columns}
        facts |= {name: values for name, values in asked.items() if values is not None}
        chosen = chosen.with_columns(**{name: chosen.spread(values) for name, values in facts.items()})
    return chosen, totals


def describe(table: CompletionTable, part_names: Sequence[str]) -> dict[str, float]:
    """Compute the metrics of a step's groups."""
    rewards, lengths = table.by_group("reward"), table.num_targets.float().view(table.num_groups, -1)
    n = rewards.shape[1]
    ids = [row.numpy().tobytes() for row in table.token_ids.split(table.lengths.tolist())]
    metrics = {"reward/mean": rewards.nanmean().item()} if part_names else {}
    if "flat" in table.facts:  # completions are compared
        metrics["reward/std"] = spread_within(rewards)
        metrics["groups/flat"] = table.facts["flat"].double().mean().item()
    if n > 1:
        unique = [(len({*ids[i : i + n]}) - 1) / (n - 1) for i in range(0, len(ids), n)]
        metrics["groups/unique_completions"] = sum(unique) / len(unique)
    metrics |= {
        "completion/length_mean": lengths.mean().item(),
        "completion/length_max": lengths.max().item(),
        "completion/truncated": table.facts["truncated"].double().mean().item(),
    }
    for name, column in zip(part_names, parts_of(table).unbind(1), strict=True):
        metrics[f"reward/{name}/mean"] = column.nanmean().item()
    correlation = length_reward_correlation(lengths, rewards)
    if correlation is not None:
        metrics["completion/length_reward_correlation"] = correlation
    for name, values in table.logged.items():
        metrics[f"logged/{name}"] = values.mean().item()
    episodes = table.facts["episode"]
    if len(episodes := episodes[~episodes[:, 0].isnan()]):
        turns, calls, failures, given_up, _ = episodes.sum(0).tolist()
        metrics["turns/mean"] = turns / len(episodes)
        metrics["tools/calls"] = calls / len(episodes)
        metrics["tools/failures"] = failures / max(1, calls)
        metrics["tools/given_up"] = given_up / max(1, calls)
    return metrics
