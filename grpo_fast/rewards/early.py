"""Rewards of groups that are complete, computed while others still decode."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from grpo_fast.data.types import Prompt
from grpo_fast.rewards.calls import CallFailed
from grpo_fast.rewards.reward_set import RewardSet, column_names
from grpo_fast.rewards.types import RewardError
from grpo_fast.rollout.types import Completion


class EarlyScores:
    """Calls the functions marked `per_group` on each group as it completes, one call after the other.

    A function that fails drops out: it is called once more for the whole batch, like those that are not
    marked, so its error is the one that it would have raised anyway.
    """

    def __init__(self, rewards: RewardSet, prompts: Sequence[Prompt]) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._columns = column_names(prompts)
        self._values: dict[str, dict[int, list[float]]] = {r.name: {} for r in rewards.rewards if r.per_group}
        self._due: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        self._stopped = False
        # A daemon: an interrupted run does not wait for a reward that hangs.
        self._thread = threading.Thread(target=self._work, name="early rewards", daemon=True)
        self._thread.start()

    def group_done(self, index: int, completions: list[Completion]) -> None:
        """Every completion of prompt `index` is there."""
        self._due.put((index, completions))

    def values(self) -> dict[str, list[float]]:
        """By function, its values for all completions, group after group; waits for the calls under way."""
        self._due.put(None)
        self._thread.join()
        groups = range(len(self._prompts))
        return {
            name: [value for index in groups for value in scored[index]]
            for name, scored in self._values.items()
            if len(scored) == len(groups)
        }

    def cancel(self) -> None:
        """Nobody wants the values any more."""
        self._stopped = True
        self._due.put(None)

    def _work(self) -> None:
        while (done := self._due.get()) is not None and not self._stopped:
            index, completions = done
            for name in list(self._values):
                prompt = self._prompts[index]
                try:
                    values = self._rewards.score_group(name, prompt, completions, self._columns)
                except (CallFailed, RewardError):
                    del self._values[name]
                else:
                    self._values[name][index] = values
