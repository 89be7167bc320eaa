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
    """Derive from it and write the moments that are wanted; each does nothing here.

    They are called in the process and thread of the training, one after the other. A step's metrics are
    written when its moments come; a run that a callback's error ends has saved the step.
    """

    def on_train_begin(self, step: int, config: TrainConfig, policy: Policy) -> None:
        """Everything is loaded, and the first step is to come.

        Args:
            step: steps done; more than 0 in a resumed run.
            config: the whole run; its folder is `config.output_dir`.
            policy: the model in training and its tokenizer: `policy.model`, `policy.tokenizer`.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """A step is done; True ends the run after it. `metrics`: as in metrics.jsonl and timings.jsonl."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """The held-out questions are scored; True ends the run. `metrics`: `eval/score` and its like."""

    def on_save(self, step: int, folder: Path) -> None:
        """A checkpoint lies in `folder`."""

    def on_train_end(self, step: int, stopped_by: str | None) -> None:
        """The run has ended, not by an error: all is saved and its report written.

        Args:
            step: steps done.
            stopped_by: what ended the run before max_steps: SIGINT, SIGTERM, or a callback's name.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know again, as JSON; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave; called before `on_train_begin`, where a run is resumed."""


MOMENTS = [name for name in vars(Callback) if name.startswith("on_")]


class CallbackError(RuntimeError):
    """A callback raised, or is none."""


class Callbacks:
    """The callbacks of a run, called in their order; after one that raises, none is called any more."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.stopped_by: str | None = None  # the callback that ended the run
        self._failed = False
        self._state: dict[str, Any] = {}  # when last asked for
        self._named: dict[str, Callback] = {}
        for callback in callbacks:
            name = type(callback).__name__
            number = sum(type(other).__name__ == name for other in self._named.values())
            self._named[f"{name}_{number + 1}" if number else name] = callback

    def tell(self, moment: str, *arguments: Any) -> None:
        """Call a moment of each.

        Raises:
            CallbackError: one raised, or returned something else than a bool; it names file and line.
        """
        for name in self._named:
            answer = self._ask(name, moment, *arguments)
            if answer not in (None, True, False):
                problem = f"returned {short(answer)}; return True to end the run, else nothing"
                raise CallbackError(f"callback {name}.{moment} {problem}")
            if answer:
                self.stopped_by = name

    def state_dict(self) -> dict[str, Any]:
        """By name, what is not empty; after a failure, what it was before.

        Raises:
            CallbackError: one raised, or gave what JSON cannot hold.
        """
        if not self._failed:
            states = {name: self._ask(name, "state_dict") for name in self._named}
            self._state = {name: state for name, state in states.items() if state}
        return self._state

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """The state of a callback that is not there any more is left, with a warning."""
        for name, state in states.items():
            if name in self._named:
                self._ask(name, "load_state_dict", state)
            else:
                logger.warning(
                    "the checkpoint's state of callback %s is left: there is none of this name", name
                )

    def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        if self._failed:
            return None
        try:
            answer = getattr(self._named[name], method)(*arguments)
            return json.loads(json.dumps(answer)) if method == "state_dict" else answer
        except Exception as error:
            self._failed = True
            problem = f"raised {type(error).__name__}: {error}{raised_at(error)}"
            raise CallbackError(f"callback {name}.{method} {problem}") from error


def load_callbacks(paths: Sequence[str]) -> list[Callback]:
    """The callbacks that the configuration names, made where a class is named.

    Raises:
        ValueError: a path leads to no callback, to one that cannot be made without arguments, or to one with
            a moment that does not exist.
    """
    found = []
    for path in paths:
        made = load_object(path, "callbacks")
        if inspect.isclass(made) and issubclass(made, Callback):
            try:
                made = made()
            except Exception as error:
                problem = f"cannot be made without arguments ({type(error).__name__}: {error})"
                remedy = "give them defaults, or an object from Python"
                raise ValueError(f"callbacks: {path!r} {problem}; {remedy}") from error
        if not isinstance(made, Callback):
            raise ValueError(f"callbacks: {path!r} is no callback; derive its class from grpo_fast.Callback")
        for name in dir(made):
            if name.startswith("on_") and name not in MOMENTS:
                known = choices(name, MOMENTS)
                raise ValueError(f"callbacks: {path!r} has {name}, which is no moment: {known}")
        found.append(made)
    return found
