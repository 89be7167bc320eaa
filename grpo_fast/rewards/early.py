"""Score groups while other completions still decode."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from grpo_fast.data.types import Prompt
from grpo_fast.rewards.calls import CallFailed
from grpo_fast.rewards.reward_set import RewardSet
from grpo_fast.rewards.types import Log, RewardError, Scored, column_names
from grpo_fast.rollout.types import Completion


class EarlyScores:
    """Call the functions marked `per_group` on each group as soon as its completions have ended.

    Calls are sequential; only functions without a timeout overlap. A function that fails drops out and is
    called again for the whole batch, like unmarked ones, so that its error is the same.
    """

    def __init__(self, rewards: RewardSet, prompts: Sequence[Prompt]) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._columns = column_names(prompts)
        self._functions = {reward.name: reward for reward in rewards.rewards if reward.per_group}
        self._scored: dict[str, dict[int, Scored]] = {name: {} for name in self._functions}
        self._due: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="early rewards", daemon=True)
        self._thread.start()

    def group_done(self, index: int, completions: list[Completion]) -> None:
        """Score the group of prompt `index`, all completions of which have ended."""
        self._due.put((index, completions))

    def values(self) -> dict[str, Scored]:
        """Wait for the pending calls, and return the values of functions that have scored all groups."""
        self._due.put(None)
        self._thread.join()
        found = {}
        for name, by_group in self._scored.items():
            if len(by_group) == len(self._prompts):
                values, log = [], Log(0)
                for index in range(len(self._prompts)):
                    values += by_group[index][0]
                    log.add(by_group[index][1])
                found[name] = values, log
        return found

    def cancel(self) -> None:
        self._stopped = True
        self._due.put(None)

    def _work(self) -> None:
        pending: list[tuple[str, int, Callable[[], Scored]]] = []
        while (done := self._due.get()) is not None and not self._stopped:
            index, completions = done
            for name in [*self._scored]:
                reward = self._functions[name]
                with self._dropped_on_failure(name):
                    finish = self._rewards.start_group(
                        reward, self._prompts[index], completions, self._columns
                    )
                    if reward.timeout is None:
                        pending.append((name, index, finish))
                    else:
                        self._scored[name][index] = finish()
        for name, index, finish in pending:
            if name in self._scored and not self._stopped:
                with self._dropped_on_failure(name):
                    self._scored[name][index] = finish()

    @contextmanager
    def _dropped_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except (CallFailed, RewardError):
            del self._scored[name]
