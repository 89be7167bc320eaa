"""Score completions with several weighted reward functions."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from grpo_fast.config.lookup import choices
from grpo_fast.config.rewards import BUILTINS, RewardConfig
from grpo_fast.config.secrets import in_use
from grpo_fast.data.types import Prompt
from grpo_fast.rewards.builtins.options import answers_of, column_options
from grpo_fast.rewards.calls import CallFailed, Runner, check_scores, is_async
from grpo_fast.rewards.loading import load_function
from grpo_fast.rewards.types import (
    Log,
    RewardBatch,
    RewardError,
    RewardFunction,
    RewardResult,
    Scored,
    column_names,
    weighted_sum,
)
from grpo_fast.rollout.types import Completion, Episode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reward:
    """One reward function with its weight and limits."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # passed at each call
    timeout: float | None = 60.0  # seconds of one call; None: no limit, and calls may overlap
    on_error: Literal["fail", "skip"] = "fail"
    per_group: bool = False  # its values for a prompt's completions do not depend on other prompts
    written: str = ""  # its name in the configuration
    environment: type | None = None  # the class whose `get_reward` was called in the episodes


def load_rewards(
    configs: Sequence[RewardConfig], environments: Sequence[type] = (), *, optional: bool = False
) -> RewardSet:
    """Load the configured reward functions; repeated names are numbered.

    Each of the run's `environments` with a method `get_reward` adds a reward of weight 1, as in TRL. With
    `optional` there may be no reward. Raises ValueError for an unknown name or option.
    """
    rewards = []
    for place, config in enumerate(configs):
        given = in_use(config.options, f"rewards.{place}.options")
        name, function, options = load_function(config.reward, given)
        how = config.model_dump(include={"weight", "on_error"})
        how |= {"per_group": config.per_group or config.reward in BUILTINS, "timeout": config.call_timeout}
        rewards.append(Reward(name, function, options=options, written=config.reward, **how))
    own = (kind for kind in environments if hasattr(kind, "get_reward"))
    rewards += [Reward(kind.__name__, kind.get_reward, environment=kind) for kind in own]
    seen = Counter[str]()
    for place, reward in enumerate(rewards):
        seen[reward.name] += 1
        if seen[reward.name] > 1:
            rewards[place] = replace(reward, name=f"{reward.name}_{seen[reward.name]}")
    return RewardSet(rewards, optional=optional)


class RewardSet:
    """Score completions. Plain functions run one after the other, async ones concurrently."""

    def __init__(self, rewards: Sequence[Reward], *, optional: bool = False) -> None:
        """Raise ValueError for two rewards of one name, or for none unless `optional`."""
        self.rewards = tuple(rewards)
        self.names = tuple(reward.name for reward in rewards)
        if not rewards and not optional:
            remedy = "set rewards=[{reward: NAME}], or a rollout.environment with a method get_reward"
            raise ValueError(f"rewards is empty: nothing scores completions; {remedy}")
        if len(set(self.names)) < len(rewards):
            raise ValueError(f"each reward needs another name; got {list(self.names)}")
        self.weights = tuple(reward.weight for reward in rewards)
        self._runner = Runner()
        self.step, self.max_steps = 0, 0  # of the run, passed to functions as `trainer_state`

    def position(self, name: str | None) -> int:
        """Return the index of the reward of that name, or written so in `rewards`; None: the first."""
        known = [*self.names, *(reward.written for reward in self.rewards)]
        if name is not None and name not in known:
            problem = f"is not among the rewards: {choices(name, self.names)}"
            raise ValueError(f"evaluation.reward = {name!r} {problem}")
        return 0 if name is None else known.index(name) % len(self.names)

    def check_columns(self, columns: Sequence[str], prompts: Sequence[Prompt] = ()) -> None:
        """Raise RewardError, before a run, for a missing column or an answer of a wrong type."""
        empty = RewardBatch.of([], [], columns)
        for reward in self.rewards:
            if reward.environment is not None:
                continue
            empty.arguments(reward.name, reward.function, reward.options, self._extras(Log(0)))
            for option, column in column_options(reward.function).items():
                if column not in columns:
                    problem = f"reads the column {column!r} ({option}): {choices(column, columns)}"
                    raise RewardError(reward.name, problem)
                for prompt in prompts if option == "answer_column" else ():
                    try:
                        answers_of(prompt.columns.get(column))
                    except ValueError as error:
                        problem = f"reads the column {column!r} ({option}), row {prompt.index}: {error}"
                        raise RewardError(reward.name, problem) from error

    def score_completions(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        *,
        precomputed: Mapping[str, Scored] | None = None,
    ) -> RewardResult:
        """Score each prompt's completions; the result has a row per completion, group after group.

        `precomputed` has the values of `EarlyScores`. Raises RewardError if a function fails with `on_error:
        fail`, or if none applies to any completion.
        """
        batch = RewardBatch.of(prompts, completions, column_names(prompts))
        if not len(batch):
            raise ValueError("completions is empty; there is nothing to score")
        values = {name: scores for name, (scores, _) in (precomputed or {}).items()}
        logs = {name: log for name, (_, log) in (precomputed or {}).items()}
        episodes = [completion.episode for group in completions for completion in group]
        for reward in self.rewards:
            if reward.environment is not None:
                values[reward.name] = _environment_rewards(reward.environment, episodes)
        skipped: dict[str, str] = {}
        due = [reward for reward in self.rewards if reward.name not in values]
        running = {reward.name: self._start(reward, batch) for reward in due if is_async(reward.function)}
        for reward in sorted(due, key=lambda reward: reward.name in running):
            finish = running.get(reward.name) or self._start(reward, batch)
            try:
                values[reward.name], logs[reward.name] = finish()
            except CallFailed as failure:
                if reward.on_error == "fail":
                    sample = failure.sample
                    where = f"; the batch has {len(batch)} completions, the first is" * (sample is None)
                    problem = f"{failure}{where}\n{batch.describe(sample or 0)}"
                    raise RewardError(reward.name, problem, sample) from failure.__cause__
                logger.warning("reward %r %s; skipped for %d completions", reward.name, failure, len(batch))
                values[reward.name] = [math.nan] * len(batch)
                skipped[reward.name] = str(failure)
        if not self.rewards:
            return RewardResult(torch.zeros(len(batch), 0), torch.zeros(len(batch)), Log(len(batch)), {})
        table = torch.tensor([values[name] for name in self.names], dtype=torch.float64).T.contiguous()
        if not skipped:
            self._report_unscored(table, batch)
        return RewardResult(
            table.float(), weighted_sum(table, self.weights), _merged_logs(logs, batch), skipped
        )

    def start_group(
        self, reward: Reward, prompt: Prompt, completions: Sequence[Completion], columns: Sequence[str]
    ) -> Callable[[], Scored]:
        """Call one function on one group; the returned function waits for the values and the log.

        Both raise CallFailed or RewardError if the function fails.
        """
        return self._start(reward, RewardBatch.of([prompt], [completions], columns))

    def _start(self, reward: Reward, batch: RewardBatch) -> Callable[[], Scored]:
        log = Log(len(batch))
        arguments = batch.arguments(reward.name, reward.function, reward.options, self._extras(log))
        finish = self._runner.start(reward.name, reward.function, arguments, reward.timeout)
        return lambda: (check_scores(finish(), len(batch)), log)

    def _extras(self, log: Log) -> dict[str, Any]:
        """Return the arguments that are not of the batch, as in TRL."""
        from transformers import TrainerState

        state = TrainerState(global_step=self.step, max_steps=self.max_steps)
        return {"trainer_state": state, "log_metric": log.log_metric, "log_extra": log.log_extra}

    def _report_unscored(self, table: torch.Tensor, batch: RewardBatch) -> None:
        """Log completions that no function scores; raise RewardError if none of the batch is scored."""
        unscored = table.isnan().all(dim=1).nonzero().flatten().tolist()
        if not unscored:
            return
        problem = f"gave None for {len(unscored)} of {len(batch)} completions: nothing scores them"
        names, sample = ", ".join(self.names), batch.describe(unscored[0])
        if len(unscored) == len(batch):
            remedy = "check that the columns hold what the rewards expect"
            raise RewardError(names, f"{problem}; {remedy}\n{sample}", unscored[0])
        logger.warning("reward %r %s; the first is %s", names, problem, sample)


def _environment_rewards(environment: type, episodes: Sequence[Episode | None]) -> list[float]:
    """Return the rewards of episodes in exactly this class of environment; NaN for others."""
    given = [e.reward if e is not None and type(e.environment) is environment else None for e in episodes]
    return [math.nan if reward is None else reward for reward in given]


def _merged_logs(logs: Mapping[str, Log], batch: RewardBatch) -> Log:
    """Merge the logs of several functions; raise RewardError if two have logged the same column."""
    whole = Log(len(batch))
    for name, log in logs.items():
        for column, values in log.extra.items():
            if column in whole.extra:
                raise RewardError(name, f"logs the extra column {column!r}, as another does; rename one")
            whole.extra[column] = values
        for metric, numbers in log.metrics.items():
            whole.metrics.setdefault(metric, []).extend(numbers)
    return whole
