"""Several reward functions, weighted."""

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
from grpo_fast.rewards.calls import Call, CallFailed, Runner, check_scores, is_async
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
    """One reward function and how it counts."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # passed at each call
    timeout: float | None = 60.0  # seconds one call may take; None: it ends by itself, and calls may overlap
    on_error: Literal["fail", "skip"] = "fail"
    per_group: bool = False  # scores a prompt's completions by themselves, whatever the others are
    written: str = ""  # as the configuration names it
    environment: type | None = None  # which has given it in its episodes: nothing is called


def load_rewards(
    configs: Sequence[RewardConfig], environments: Sequence[type] = (), *, optional: bool = False
) -> RewardSet:
    """The reward functions that the configuration names; a name that occurs again is numbered.

    Args:
        environments: the run's; each with a method `get_reward` is one more reward, of weight 1, as in TRL.
        optional: there may be none.

    Raises:
        ValueError: an unknown name, or options that a reward does not take.
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
    """Scores completions. Plain functions are called one after the other, async ones all at once."""

    def __init__(self, rewards: Sequence[Reward], *, optional: bool = False) -> None:
        """Raises ValueError for two rewards of one name, or for none unless they are `optional`."""
        self.rewards = tuple(rewards)
        self.names = tuple(reward.name for reward in rewards)
        if not rewards and not optional:
            raise ValueError(
                "rewards is empty: nothing scores completions; give rewards=[{reward: NAME}], or a "
                "rollout.environment with a method get_reward"
            )
        if len(set(self.names)) < len(rewards):
            raise ValueError(f"each reward needs a name of its own; got {list(self.names)}")
        self.weights = tuple(reward.weight for reward in rewards)
        self._runner = Runner()
        self.step, self.max_steps = 0, 0  # of the run, which functions are told as `trainer_state`

    def position(self, name: str | None) -> int:
        """Which reward decides an evaluation: by its name or as `rewards` writes it; by default the first.

        Raises:
            ValueError: there is none.
        """
        known = [*self.names, *(reward.written for reward in self.rewards)]
        if name is not None and name not in known:
            problem = f"is not among the rewards: {choices(name, self.names)}"
            raise ValueError(f"evaluation.reward = {name!r} {problem}")
        return 0 if name is None else known.index(name) % len(self.names)

    def check_columns(self, columns: Sequence[str], prompts: Sequence[Prompt] = ()) -> None:
        """Raise RewardError for a column that a function asks for and the data lacks, or for a wrong answer.

        For the start of a run, before anything is generated.
        """
        empty = RewardBatch.of([], [], columns)
        for reward in self.rewards:
            if reward.environment is not None:
                continue
            empty.arguments(reward.name, reward.function, reward.options, self._beside(Log(0)))
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
        """Score each prompt's completions: one row of the result a completion, group after group.

        Args:
            precomputed: by name, what functions gave that have scored all of them already: see `EarlyScores`.

        Raises:
            RewardError: a function fails and is not to be skipped, or none applies to any sample.
            ValueError: there is no completion.
        """
        batch = RewardBatch.of(prompts, completions, column_names(prompts))
        if not len(batch):
            raise ValueError("completions is empty; there is nothing to score")
        values = {name: scores for name, (scores, _) in (precomputed or {}).items()}
        logs = {name: log for name, (_, log) in (precomputed or {}).items()}
        episodes = [completion.episode for group in completions for completion in group]
        for reward in self.rewards:
            if reward.environment is not None:
                values[reward.name] = _given(reward.environment, episodes)
        skipped: dict[str, str] = {}
        due = [reward for reward in self.rewards if reward.name not in values]
        running = {reward.name: self._start(reward, batch) for reward in due if is_async(reward.function)}
        for reward in sorted(due, key=lambda reward: reward.name in running):
            call = running.get(reward.name) or self._start(reward, batch)
            try:
                values[reward.name] = check_scores(self._runner.finish(call), len(batch))
                logs[reward.name] = call.log or Log(len(batch))
            except CallFailed as failure:
                if reward.on_error == "fail":
                    sample = failure.sample
                    where = f"; the batch has {len(batch)} completions, the first is" * (sample is None)
                    problem = f"{failure}{where}\n{batch.describe(sample or 0)}"
                    raise RewardError(reward.name, problem, sample) from failure.__cause__
                logger.warning("reward %r %s; skipped for %d completions", reward.name, failure, len(batch))
                values[reward.name] = [math.nan] * len(batch)
                skipped[reward.name] = str(failure)
        if not self.rewards:  # of a loss that reads none
            return RewardResult(torch.zeros(len(batch), 0), torch.zeros(len(batch)), Log(len(batch)), {})
        table = torch.tensor([values[name] for name in self.names], dtype=torch.float64).T.contiguous()
        if not skipped:
            self._report_unscored(table, batch)
        return RewardResult(table.float(), weighted_sum(table, self.weights), _together(logs, batch), skipped)

    def start_group(
        self, reward: Reward, prompt: Prompt, completions: Sequence[Completion], columns: Sequence[str]
    ) -> Callable[[], Scored]:
        """Call one function on one prompt's completions; what returns waits for its values and its log.

        Raises:
            CallFailed, RewardError: it fails, here or later; scoring the whole batch then says how.
        """
        batch = RewardBatch.of([prompt], [completions], columns)
        call = self._start(reward, batch)
        return lambda: (check_scores(self._runner.finish(call), len(batch)), call.log or Log(len(batch)))

    def _start(self, reward: Reward, batch: RewardBatch) -> Call:
        log = Log(len(batch))
        arguments = batch.arguments(reward.name, reward.function, reward.options, self._beside(log))
        return replace(self._runner.start(reward.name, reward.function, arguments, reward.timeout), log=log)

    def _beside(self, log: Log) -> dict[str, Any]:
        """What functions may ask for besides the batch, as in TRL."""
        from transformers import TrainerState

        state = TrainerState(global_step=self.step, max_steps=self.max_steps)
        return {"trainer_state": state, "log_metric": log.log_metric, "log_extra": log.log_extra}

    def _report_unscored(self, table: torch.Tensor, batch: RewardBatch) -> None:
        """A row that no function scores is a fact about the data; a whole batch of them is a mistake."""
        unscored = table.isnan().all(dim=1).nonzero().flatten().tolist()
        if not unscored:
            return
        problem = f"gave None for {len(unscored)} of {len(batch)} completions: nothing scores them"
        names, sample = ", ".join(self.names), batch.describe(unscored[0])
        if len(unscored) == len(batch):
            remedy = "check that the columns hold what the rewards expect"
            raise RewardError(names, f"{problem}; {remedy}\n{sample}", unscored[0])
        logger.warning("reward %r %s; the first is %s", names, problem, sample)


def _given(environment: type, episodes: Sequence[Episode | None]) -> list[float]:
    """What environments of this class, not of one derived from it, gave themselves; NaN for others."""
    given = [e.reward if e is not None and type(e.environment) is environment else None for e in episodes]
    return [math.nan if reward is None else reward for reward in given]


def _together(logs: Mapping[str, Log], batch: RewardBatch) -> Log:
    """What several functions logged of one batch.

    Raises:
        RewardError: two have logged one column.
    """
    whole = Log(len(batch))
    for name, log in logs.items():
        for column, values in log.extra.items():
            if column in whole.extra:
                raise RewardError(name, f"logs the extra column {column!r}, as another does; rename one")
            whole.extra[column] = values
        for metric, numbers in log.metrics.items():
            whole.metrics.setdefault(metric, []).extend(numbers)
    return whole
