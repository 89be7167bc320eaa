"""Call a user's callbacks during a run; a callback may end the run."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.config.lookup import choices, load_object, raised_at
from grpo_fast.config.section import short

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig
    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)


class Callback:
    """Derive from this class and override the methods that you need.

    The trainer calls the callbacks in order, in its own process and thread, after it has written the step's
    metrics. An error in a callback ends the run; the step is saved.
    """

    def on_train_begin(self, step: int, config: TrainConfig, policy: Policy) -> None:
        """Run before the first step; in a resumed run `step` is above 0."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Run after each step, with its metrics and timings; return True to end the run."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Run after each evaluation, with `eval/score` and more; return True to end the run."""

    def on_save(self, step: int, folder: Path) -> None:
        """Run after each checkpoint, which is in `folder`."""

    def on_train_end(self, step: int, stopped_by: str | None) -> None:
        """Run at the end. `stopped_by` names the signal or callback; None at max_steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; called before `on_train_begin` of a resumed run."""


MOMENTS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackError(RuntimeError):
    """A callback raised, or did not return a bool or None; the message names its file and line."""


class Callbacks:
    """The callbacks of a run, in order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.stopped_by: str | None = None  # the callback that ended the run
        self._named: dict[str, Callback] = {}
        for callback in callbacks:
            name = type(callback).__name__
            number = sum(type(other).__name__ == name for other in self._named.values())
            self._named[f"{name}_{number + 1}" if number else name] = callback

    def call(self, moment: str, *arguments: Any) -> None:
        """Call a method of each callback, and note the last that asked to end the run."""
        for name in self._named:
            answer = self._call(name, moment, *arguments)
            if answer not in (None, True, False):
                problem = f"returned {short(answer)}; return True to end the run, else nothing"
                raise CallbackError(f"callback {name}.{moment} {problem}")
            if answer:
                self.stopped_by = name

    def state_dict(self) -> dict[str, Any]:
        """Return the non-empty states by name."""
        states = {name: self._call(name, "state_dict") for name in self._named}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the states; warn of a state without a callback."""
        for name, state in states.items():
            if name in self._named:
                self._call(name, "load_state_dict", state)
            else:
                logger.warning("the checkpoint has a state of callback %s, which the run does not have", name)

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        try:
            answer = getattr(self._named[name], method)(*arguments)
            return json.loads(json.dumps(answer)) if method == "state_dict" else answer
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}{raised_at(error)}"
            raise CallbackError(f"callback {name}.{method} {problem}") from error


def load_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Load the callbacks at import paths; a class is called without arguments."""
    callbacks = []
    for path in paths:
        value = load_object(path, "callbacks")
        try:
            callback = value() if inspect.isclass(value) else value
        except Exception as error:
            raise ValueError(f"callbacks: {path!r} cannot be made without arguments ({error!r})") from error
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks: {path!r} is no callback; derive its class from grpo_fast.Callback")
        for name in dir(callback):
            if name.startswith("on_") and name not in MOMENTS:
                known = choices(name, MOMENTS)
                raise ValueError(f"callbacks: {path!r} has {name}, which is no moment: {known}")
        callbacks.append(callback)
    return callbacks
