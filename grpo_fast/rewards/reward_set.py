"""Several reward functions, weighted."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from grpo_fast.data.names import choices
from grpo_fast.data.types import Message, Prompt
from grpo_fast.rewards.batch import Batch, arguments, make_batch
from grpo_fast.rewards.builtins.options import column_options
from grpo_fast.rewards.calls import Call, CallFailed, Raised, Runner, check_values, is_async
from grpo_fast.rewards.config import RewardConfig
from grpo_fast.rewards.loading import load_function
from grpo_fast.rewards.types import RewardError, RewardFunction, RewardResult, weighted_sum
from grpo_fast.rollout.types import Completion

logger = logging.getLogger(__name__)
NOTHING_KNOWN: Mapping[str, Sequence[float]] = MappingProxyType({})


@dataclass(frozen=True)
class Reward:
    """One reward function and how it counts."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # passed at each call
    timeout: float = 60.0  # seconds one call may take
    on_error: Literal["fail", "skip"] = "fail"
    per_group: bool = False  # scores a prompt's completions by themselves, whatever the others are


def load_rewards(configs: Sequence[RewardConfig]) -> RewardSet:
    """The reward functions that the configuration names; a name that occurs again is numbered.

    Raises:
        ValueError: an unknown name, or options that a reward does not take.
    """
    rewards, seen = [], Counter[str]()
    for config in configs:
        name, function, options = load_function(config.reward, config.options)
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}_{seen[name]}"
        rewards.append(
            Reward(
                name,
                function,
                config.weight,
                options,
                config.timeout,
                config.on_error,
                config.per_group,
            )
        )
    return RewardSet(rewards)


class RewardSet:
    """Scores completions. Plain functions are called one after the other, async ones all at once."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """Raises ValueError for no reward, or two of one name."""
        self.rewards = tuple(rewards)
        self.names = tuple(reward.name for reward in rewards)
        if not rewards:
            raise ValueError("rewards is empty: nothing scores completions; give rewards=[{reward: NAME}]")
        if len(set(self.names)) < len(rewards):
            raise ValueError(f"each reward needs a name of its own; got {list(self.names)}")
        self.weights = tuple(reward.weight for reward in rewards)
        self._runner = Runner()

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises RewardError when a function's signature asks for something that the data does not have.

        For the start of a run, before anything is generated.
        """
        empty = Batch([], [], {name: [] for name in columns}, [])
        for reward in self.rewards:
            arguments(reward.name, reward.function, reward.options, empty)
            for option, column in column_options(reward.function).items():
                if column not in columns:
                    problem = f"reads the column {column!r} ({option}): {choices(column, columns)}"
                    raise RewardError(reward.name, problem)

    def score_completions(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        *,
        known: Mapping[str, Sequence[float]] = NOTHING_KNOWN,
    ) -> RewardResult:
        """Scores each prompt's completions: one row of the result a completion, group after group.

        Args:
            known: values of functions that have scored all of them already, by name, see `EarlyScores`.
        """
        batch = completions_batch(prompts, completions, column_names(prompts))
        return self._score(batch, known)

    def score_group(
        self, name: str, prompt: Prompt, completions: Sequence[Completion], columns: Sequence[str]
    ) -> list[float]:
        """One function's values for one prompt's completions.

        Raises:
            CallFailed: it fails; scoring the whole batch then says how.
        """
        reward = self.rewards[self.names.index(name)]
        batch = completions_batch([prompt], [completions], columns)
        call = self._start(reward, arguments(name, reward.function, reward.options, batch))
        return check_values(self._runner.finish(call), len(batch))

    def score(
        self,
        prompts: Sequence[str | list[Message]],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> RewardResult:
        """Scores N completions.

        Args:
            prompts: N texts or conversations; the completion of a conversation reaches the functions as one.
            completions: N texts.
            columns: the dataset's other columns, N values each.
            completion_ids: N lists of tokens, for functions that ask for them.

        Raises:
            RewardError: a function fails and is not to be skipped, or none applies to any sample.
            ValueError: lengths that differ.
        """
        return self._score(make_batch(prompts, completions, columns, completion_ids), NOTHING_KNOWN)

    def _score(self, batch: Batch, known: Mapping[str, Sequence[float]]) -> RewardResult:
        if not len(batch):
            raise ValueError("completions is empty; there is nothing to score")
        values, skipped = self._call_all(batch, known)
        table = torch.tensor(values, dtype=torch.float64).T.contiguous()
        applies = ~table.isnan()
        self._report_unscored(applies, skipped, batch)
        return RewardResult(table.float(), weighted_sum(table, self.weights), skipped)

    def _call_all(
        self, batch: Batch, known: Mapping[str, Sequence[float]]
    ) -> tuple[list[list[float]], dict[str, str]]:
        """F lists of N values, and why some of them are all NaN."""
        due = [reward for reward in self.rewards if reward.name not in known]
        calls = {r.name: arguments(r.name, r.function, r.options, batch) for r in due}
        running = {r.name: self._start(r, calls[r.name]) for r in due if is_async(r.function)}
        outcomes: dict[str, list[float] | CallFailed] = {name: list(known[name]) for name in known}
        for reward in due:
            if reward.name not in running:
                outcomes[reward.name] = self._outcome(reward, self._start(reward, calls[reward.name]), batch)
        for reward in due:
            if reward.name in running:
                outcomes[reward.name] = self._outcome(reward, running[reward.name], batch)
        skipped = {
            name: str(outcome) for name, outcome in outcomes.items() if isinstance(outcome, CallFailed)
        }
        values = [[math.nan] * len(batch) if name in skipped else outcomes[name] for name in self.names]
        return values, skipped

    def _start(self, reward: Reward, call: Mapping[str, Any]) -> Call:
        return self._runner.start(reward.name, reward.function, call, reward.timeout)

    def _outcome(self, reward: Reward, call: Call, batch: Batch) -> list[float] | CallFailed:
        """The values, or the failure where it is to be skipped; raises RewardError where it is not."""
        try:
            return check_values(self._runner.finish(call), len(batch))
        except CallFailed as failure:
            if reward.on_error == "fail":
                raise self._error(reward, failure, batch) from failure.__cause__
            logger.warning("reward %r %s; skipped for %d completions", reward.name, failure, len(batch))
            return failure

    def _error(self, reward: Reward, failure: CallFailed, batch: Batch) -> RewardError:
        """Names the sample: the one with the wrong value, or the first that fails alone too."""
        sample = failure.sample
        if sample is None and isinstance(failure, Raised):
            sample = self._first_raising(reward, type(failure.__cause__), batch)
        where = "" if sample is not None else f"; the batch has {len(batch)} completions, the first is"
        described = batch.describe(sample or 0)
        return RewardError(reward.name, f"{failure}{where}\n{described}", sample)

    def _first_raising(self, reward: Reward, error: type[BaseException], batch: Batch) -> int | None:
        """The first sample that raises the same when it is scored alone, searched for one timeout long."""
        deadline = time.monotonic() + reward.timeout
        for index in range(len(batch)):
            call = arguments(reward.name, reward.function, reward.options, batch.one(index))
            try:
                left = max(0.0, deadline - time.monotonic())
                self._runner.finish(self._runner.start(reward.name, reward.function, call, left))
            except Raised as failure:
                if type(failure.__cause__) is error:
                    return index
            except CallFailed:
                return None
        return None

    def _report_unscored(self, applies: torch.Tensor, skipped: Mapping[str, str], batch: Batch) -> None:
        """A row that no function scores is a fact about the data; a whole batch of them is a mistake."""
        unscored = (~applies.any(dim=1)).nonzero().flatten().tolist()
        if not unscored or skipped:
            return
        problem = f"gave None for {len(unscored)} of {len(batch)} completions: nothing scores them"
        sample = batch.describe(unscored[0])
        names = ", ".join(self.names)
        if len(unscored) == len(batch):
            remedy = "check that the columns hold what the rewards expect"
            raise RewardError(names, f"{problem}; {remedy}\n{sample}", unscored[0])
        logger.warning("reward %r %s; the first is %s", names, problem, sample)


def column_names(prompts: Sequence[Prompt]) -> list[str]:
    """Every column that some prompt has."""
    return list({name: None for prompt in prompts for name in prompt.columns})


def completions_batch(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], columns: Sequence[str]
) -> Batch:
    """One sample a completion, group after group; None where a prompt lacks a column."""
    pairs = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
    return make_batch(
        [prompt.prompt for prompt, _ in pairs],
        [completion.text for _, completion in pairs],
        {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in columns},
        [completion.token_ids for _, completion in pairs],
    )
