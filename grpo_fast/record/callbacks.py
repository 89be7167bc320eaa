"""Callbacks: objects of the user's that are called at the moments of a run, and may end it."""

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
    """Derive from this class and write the moments that you want; each does nothing here.

    The trainer calls them one after the other in its own process and thread. A step's metrics are written
    before its moments come. An error in a callback ends the run; the step is saved.
    """

    def on_train_begin(self, step: int, config: TrainConfig, policy: Policy) -> None:
        """The first step comes next; `step` steps are done, which is more than 0 in a resumed run."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """A step is done; return True to end the run. `metrics`: as in metrics.jsonl and timings.jsonl."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """The held-out questions are scored; return True to end the run. `metrics`: `eval/score` and more."""

    def on_save(self, step: int, folder: Path) -> None:
        """A checkpoint is saved in `folder`."""

    def on_train_end(self, step: int, stopped_by: str | None) -> None:
        """The run is saved and reported. `stopped_by`: a signal's or callback's name; None at max_steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned; called before `on_train_begin` of a resumed run."""


MOMENTS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackError(RuntimeError):
    """A callback raised, or returned something else than a bool; the message names its file and line."""


class Callbacks:
    """The callbacks of a run, called in their order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.stopped_by: str | None = None  # the callback that ended the run
        self._named: dict[str, Callback] = {}
        for callback in callbacks:
            name = type(callback).__name__
            number = sum(type(other).__name__ == name for other in self._named.values())
            self._named[f"{name}_{number + 1}" if number else name] = callback

    def tell(self, moment: str, *arguments: Any) -> None:
        """Call a moment of each callback."""
        for name in self._named:
            answer = self._call(name, moment, *arguments)
            if answer not in (None, True, False):
                problem = f"returned {short(answer)}; return True to end the run, else nothing"
                raise CallbackError(f"callback {name}.{moment} {problem}")
            if answer:
                self.stopped_by = name

    def state_dict(self) -> dict[str, Any]:
        """Return the states that are not empty, by name."""
        states = {name: self._call(name, "state_dict") for name in self._named}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the states; warn of one whose callback is no longer there."""
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
    """Return the callbacks that the configuration names; a class is called without arguments.

    Raises:
        ValueError: a path leads to something else, or the callback has a moment that does not exist.
    """
    found = []
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
        found.append(callback)
    return found
