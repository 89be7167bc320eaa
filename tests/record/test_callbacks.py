"""Callbacks: what a run tells them and when, how they stop it, and what comes of one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_fast.config.schema import TrainConfig
from grpo_fast.record.callbacks import CallbackError
from grpo_fast.record.checkpoint import CheckpointStore
from grpo_fast.record.files import read_jsonl
from grpo_fast.run import train

SOURCE = """
import json
from pathlib import Path
from grpo_fast import Callback

class Diary(Callback):
    def __init__(self):
        self.steps = []
    def note(self, *words):
        with open(self.path, "a") as file:
            print(*words, file=file)
    def on_train_begin(self, step, config, policy):
        self.path = Path(config.output_dir) / "diary.txt"
        self.note("begin", step, self.steps, type(policy).__name__)
    def on_step_end(self, step, metrics):
        self.steps.append(step)
        self.note("step", step, "reward/mean" in metrics and "time/step" in metrics)
    def on_evaluate(self, step, metrics):
        self.note("evaluated", step, "eval/score" in metrics)
    def on_save(self, step, folder):
        self.note("saved", step, folder.is_dir())
    def on_train_end(self, step, stopped_by):
        self.note("end", step, stopped_by)
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

class StopsAt2(Callback):
    def on_step_end(self, step, metrics):
        return step == 2

class Fails(Callback):
    def on_step_end(self, step, metrics):
        if step == 2:
            return json.loads("{")

class Answers(Callback):
    on_step_end = lambda self, step, metrics: "stop"

class Misspelt(Callback):
    on_step_ends = lambda self, step, metrics: None

class NeedsArgument(Callback):
    __init__ = lambda self, patience: None

class Unsaveable(Callback):
    state_dict = lambda self: {"path": Path(".")}

not_one = 3
"""
FAILING_LINE = 1 + SOURCE.splitlines().index('            return json.loads("{")')


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("callbacks") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def config(toy: dict[str, Any], tmp_path: Path, source: Path):
    def make(*names: str, **changes: Any) -> TrainConfig:
        callbacks = [f"{source}:{name}" for name in names]
        few = {"max_steps": 3, "evaluation": {**toy["evaluation"], "every": 2}, "checkpoint": {"every": 2}}
        return TrainConfig(
            **{**toy, **few, "output_dir": str(tmp_path / "run"), "callbacks": callbacks, **changes}
        )

    return make


def test_moments_come_in_order_and_states_survive_a_resume(config, tmp_path: Path):
    train(config("Diary", "StopsAt2"), display=False)
    train(config("Diary"), resume="latest", display=False)

    assert (tmp_path / "run" / "diary.txt").read_text().splitlines() == [
        "begin 0 [] Policy",
        "evaluated 0 True",
        "step 1 True",
        "step 2 True",
        "evaluated 2 True",
        "saved 2 True",
        "end 2 StopsAt2",
        "begin 2 [1, 2] Policy",
        "step 3 True",
        "evaluated 3 True",
        "saved 3 True",
        "end 3 None",
    ]
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "message", "step"),
    [
        ("Fails", rf"Fails.on_step_end raised JSONDecodeError: .*mine\.py:{FAILING_LINE}: ", 2),
        ("Answers", r"Answers.on_step_end returned 'stop'; return True", 1),
        ("Unsaveable", r"Unsaveable.state_dict raised TypeError: .*PosixPath", None),
    ],
)
def test_a_failing_callback_ends_the_run_with_its_line_and_a_save(config, tmp_path, name, message, step):
    with pytest.raises(CallbackError, match=message):
        train(config(name, "Diary"), display=False)

    saved = CheckpointStore(tmp_path / "run" / "checkpoints").load_latest()
    assert (saved and saved.step) == step


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Misspelt", "has on_step_ends, which is no moment: .*did you mean 'on_step_end'"),
        ("NeedsArgument", "cannot be made without arguments.*patience"),
        ("not_one", "is no callback; derive its class from grpo_fast.Callback"),
        ("Nowhere", "has no 'Nowhere'"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_model_is_loaded(config, tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        train(config(name, model={"path": str(tmp_path / "no-model")}), display=False)
