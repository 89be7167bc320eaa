"""Rewards that are called while other completions still decode."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from grpo_fast.data.types import Prompt
from grpo_fast.rewards.calls import CallFailed
from grpo_fast.rewards.reward_set import RewardSet
from grpo_fast.rewards.types import Log, RewardError, Scored, column_names
from grpo_fast.rollout.types import Completion


class EarlyScores:
    """Calls the functions marked `per_group` on each group as it completes, while others still decode.

    One call after the other, but for functions without a timeout, whose calls overlap. A function that fails
    drops out: it is called once more for the whole batch, like those that are not marked, so its error is
    the one that it would have raised anyway.
    """

    def __init__(self, rewards: RewardSet, prompts: Sequence[Prompt]) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._columns = column_names(prompts)
        self._functions = {reward.name: reward for reward in rewards.rewards if reward.per_group}
        self._scored: dict[str, dict[int, Scored]] = {name: {} for name in self._functions}
        self._running: list[tuple[str, int, Callable[[], Scored]]] = []
        self._due: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        self._stopped = False
        # A daemon: an interrupted run does not wait for a reward that hangs.
        self._thread = threading.Thread(target=self._work, name="early rewards", daemon=True)
        self._thread.start()

    def group_done(self, index: int, completions: list[Completion]) -> None:
        """Every completion of prompt `index` has ended."""
        self._due.put((index, completions))

    def values(self) -> dict[str, Scored]:
        """Wait for the calls under way, and return what each function gave for all completions."""
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
        """Score no further group."""
        self._stopped = True
        self._due.put(None)

    def _work(self) -> None:
        while (done := self._due.get()) is not None and not self._stopped:
            index, completions = done
            for name in list(self._scored):
                self._start(name, index, completions)
        for name, index, finish in self._running:
            if not self._stopped:
                self._finish(name, index, finish)

    def _start(self, name: str, index: int, completions: list[Completion]) -> None:
        reward = self._functions[name]
        try:
            finish = self._rewards.start_group(reward, self._prompts[index], completions, self._columns)
        except RewardError:
            del self._scored[name]
        else:
            if reward.timeout is None:
                self._running.append((name, index, finish))
            else:
                self._finish(name, index, finish)

    def _finish(self, name: str, index: int, finish: Callable[[], Scored]) -> None:
        try:
            scored = finish()
            if name in self._scored:
                self._scored[name][index] = scored
        except (CallFailed, RewardError):
            self._scored.pop(name, None)
