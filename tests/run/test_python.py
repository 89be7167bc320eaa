"""Training from Python: the run of a file, objects in the place of names, and the run as an object."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM

import grpo_fast
from grpo_fast import run
from grpo_fast.cli import main
from grpo_fast.config import lookup
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.load import load_config
from grpo_fast.config.lookup import load_callable
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.sources import read_rows
from grpo_fast.record.checkpoint import CheckpointError
from grpo_fast.record.files import read_jsonl
from grpo_fast.run.inputs import Inputs


def near_w7(completions: list[str], **columns: Any) -> list[float]:
    numbers = [[int(word[1:]) for word in text.split()] for text in completions]
    return [sum(1 / (1 + abs(n - 7)) for n in row) / max(1, len(row)) for row in numbers]


class Near:
    """A callable object, with another target for each."""

    def __init__(self, target: int) -> None:
        self.target = target

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [float(text.count(f"w{self.target}")) for text in completions]


@pytest.fixture(scope="module")
def call(toy: dict[str, Any]) -> dict[str, Any]:
    """The toy as a call: functions, rows, a flat name, a dotted key."""
    sources = (toy["dataset"]["source"], toy["evaluation"]["dataset"]["source"])
    rows, held_out = ([json.loads(line) for line in Path(path).read_text().splitlines()] for path in sources)
    given = {
        **{"model": toy["model"], "dataset": Dataset.from_list(rows), "rewards": [near_w7]},
        **{"evaluation": {"dataset": held_out, "threshold": 0.5}, "prompts_per_step": 4},
        **{"max_steps": 2, "micro_batch_tokens": 64, "learning_rate": 3e-3, "rollout.num_generations": 6},
        **{"max_completion_length": 8, "logging": {"tensorboard": False}, "checkpoint": {"every": 1}},
    }
    return given | {"display": False}


@pytest.fixture(scope="module")
def finished(call: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> grpo_fast.Run:
    return grpo_fast.train(**call, output_dir=tmp_path_factory.mktemp("python") / "run")


def test_objects_make_the_same_run_as_their_names_in_a_file(finished, toy, tmp_path: Path):
    changes = {"max_steps": 2, "checkpoint": {"every": 1}, "output_dir": str(tmp_path / "run")}
    run.train(TrainConfig(**{**toy, **changes}), display=False)

    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert (finished.folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_a_configuration_names_objects_that_only_the_call_gives(finished, capsys):
    config = load_config(finished.folder)

    assert config.rewards[0].reward == f"{__name__}:near_w7@python"
    assert config.evaluation.dataset is not None
    assert (config.dataset.source, config.evaluation.dataset.source) == (
        "dataset@python",
        "evaluation.dataset@python",
    )
    with pytest.raises(ValueError, match="near_w7@python' was an object of a Python call: repeat that call"):
        load_callable(config.rewards[0].reward, "reward")
    assert main(["preview", str(finished.folder), "rewards=[{reward: length, options: {target: 3}}]"]) == 1
    assert "dataset.source = 'dataset@python' was an object of a Python call" in capsys.readouterr().err


def test_the_run_has_tables_a_report_and_a_page_for_a_cell(finished, tmp_path: Path):
    metrics, evaluations = finished.metrics, finished.evaluations

    assert list(metrics.index) == [0, 1, 2] and metrics.loc[2, "time/step"] > 0
    assert list(evaluations["step"]) == [0, 2] and list(evaluations["n"]) == [10, 10]
    assert finished.report.name == "report.html"
    assert "step 2 of 2, held-out score" in repr(finished)
    assert "<iframe" in finished._repr_html_()
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no config\.yaml"):
        grpo_fast.Run(tmp_path)


def test_the_trained_policy_answers_and_is_saved(finished, tmp_path: Path):
    policy, prompts = finished.policy, ["w2 w13 w3 w4", "w3"]

    greedy = policy.generate(prompts)
    sampled = policy.generate(prompts, temperature=1.0, max_completion_length=3, seed=1)
    policy.save_pretrained(tmp_path / "saved")

    assert greedy == policy.generate(prompts) and len(greedy) == 2
    assert all(len(completion.token_ids) <= 3 for completion in sampled)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.vocab_size == policy.model.vocab_size and policy.generate([]) == []
    for given, sampling, message in (
        ("w2", {}, "is one prompt; give a list"),
        ([{"role": "user", "content": "w2"}], {}, "is one prompt; give a list"),
        (["w2"], {"max_tokens": 3}, "max_tokens"),
        (["w2"], {"temperature": -1.0}, "temperature"),
        ([3], {}, "must be text or a list of messages"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            policy.generate(given, **sampling)


def test_the_same_call_resumes_and_other_rows_or_names_are_refused(call, finished, tmp_path: Path):
    def other(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    again = call | {"output_dir": shutil.copytree(finished.folder, tmp_path / "run"), "max_steps": 3}
    with pytest.raises(CheckpointError, match=r"rewards\.0\.reward was '.*near_w7@python', is "):
        grpo_fast.train(**again | {"rewards": [other]}, resume=True)
    with pytest.raises(ValueError, match="belongs to other prompts than this run has"):
        grpo_fast.train(**again | {"dataset": call["dataset"].to_list()[::-1]}, resume=True)

    resumed = grpo_fast.train(**again | {"dataset": call["dataset"].to_list()}, resume=True)

    assert list(resumed.metrics.index) == [0, 1, 2, 3]


@pytest.mark.parametrize(("number", "raised"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", SystemExit)])
def test_an_interrupted_call_raises_and_keeps_the_step(call, tmp_path: Path, number: str, raised: type):
    class Interrupts(grpo_fast.Callback):
        def on_step_end(self, step, metrics) -> None:
            signal.raise_signal(signal.Signals[number])

    with pytest.raises(raised) as caught:
        grpo_fast.train(**call | {"output_dir": tmp_path / "run"}, callbacks=[Interrupts()])

    assert caught.value.args[0] == 143 if raised is SystemExit else "resume=True" in str(caught.value)
    assert list(grpo_fast.Run(tmp_path / "run").metrics.index) == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": 3}, r"model: is a int: give a folder, a hub id or a loaded model"),
        ({"dataset": []}, "dataset: has no rows"),
        ({"dataset": ["w2"]}, r"dataset\[0\]: is a str \('w2'\): a row is a dict"),
        ({"dataset": [{"prompt": "w2"}, {"prompt": object()}]}, "dataset@python, row 1: .*must be text"),
        ({"dataset": DatasetDict(train=Dataset.from_list([{"prompt": "w2"}]))}, "one of 'train'"),
        ({"dataset": {"source": [{"prompt": "w2"}], "promt_column": "p"}}, "mean dataset.prompt_column"),
        ({"evaluation": [1]}, r"evaluation.dataset\[0\]: is a int"),
        ({"rewards": [3]}, r"rewards\.0\.reward = 3: should be a valid string"),
        ({"rewards": lambda completions, answer: answer}, "evaluation: reward 'lambda' asks for 'answer'"),
        ({"overwrite": True, "resume": True}, "overwrite: goes without resume"),
    ],
)
def test_what_cannot_be_trained_with_is_named(call, tmp_path: Path, changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        grpo_fast.train(**call | {"output_dir": tmp_path / "run"} | changes)


def test_overwriting_deletes_a_run_and_nothing_else(call, tmp_path: Path):
    again = call | {"output_dir": tmp_path / "run", "overwrite": True, "max_steps": 1}
    again["logging"] = {"samples_every": 1}
    mine = [tmp_path / "run" / name / "mine.txt" for name in ("inputs", "checkpoints", "model")]
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    grpo_fast.train(**again)
    assert all(file.exists() for file in mine)
    (tmp_path / "run" / "wandb_id").write_text("of the first run")

    grpo_fast.train(**again)

    assert mine[0].exists() and not (tmp_path / "run" / "wandb_id").exists()
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    assert {record["step"] for record in read_jsonl(tmp_path / "run" / "samples.jsonl")} == {1}
    assert len(read_jsonl(tmp_path / "run" / "provenance.jsonl")) == 1


@pytest.mark.parametrize(
    ("rows", "size", "held_out", "read"),
    [
        ([{"prompt": f"w{n}"} for n in range(5)], None, 3, 5),
        ([{"prompt": f"w{n}"} for n in range(5)], 2, None, 5),
        (({"prompt": f"w{n}"} for n in count()), 4, 3, 4),
        (({"prompt": f"w{n}"} for n in count()), 3, 4, 4),
        (map(lambda n: {"prompt": f"w{n}"}, count()), None, 3, 64),
        (({"prompt": f"w{n}"} for n in count()), 4, None, "evaluation.dataset: is a stream .generator."),
    ],
)
def test_rows_of_both_sections_are_read_once_and_as_many_as_needed(rows, size, held_out, read):
    inputs, settings = Inputs(), {"model": {"path": "m"}, "rewards": [{"reward": "length"}], "max_steps": 4}
    settings["dataset"] = inputs.dataset({"source": rows, "size": size})
    config = load_config(None, settings | {"evaluation": {"dataset": {"size": held_out}}})
    if isinstance(read, str):
        with pytest.raises(ConfigError, match=read):
            inputs.read(config)
        return
    inputs.read(config)
    assert len(inputs.objects["dataset@python"]) == read


def test_the_same_call_gives_each_object_the_same_name_of_its_own():
    first, second = Inputs(), Inputs()
    lambdas = [lambda completions: completions, lambda completions: 2 * completions]
    objects: list[Any] = [Near(1), Near(2), partial(near_w7, a=1), partial(near_w7, a=2), *lambdas, Near, len]

    names = [first.name(value) for value in objects]

    assert len(set(names)) == len(objects) and names == [first.name(value) for value in objects]
    assert names == [second.name(value) for value in objects]
    assert [first.objects[name] for name in names] == objects


def test_held_out_rows_are_read_as_the_datasets_are():
    inputs = Inputs()
    settings = {"model": {"path": "m"}, "rewards": [{"reward": "length"}]}
    rows = [{"q": "w2", "n": np.array([1, 2])}]
    section = {"source": rows, "prompt_column": "q", "size": 1, "transform": lambda row: {"q": 2 * row["q"]}}
    settings["dataset"] = inputs.dataset(section)
    settings["evaluation"] = inputs.evaluation([{"q": "w3"}])

    config = load_config(None, inputs.plain(settings))

    assert config.evaluation.dataset is not None
    assert config.evaluation.dataset.prompt_column == "q" and config.evaluation.dataset.size is None
    inputs.read(config)
    assert inputs.objects[config.dataset.source] == [{"q": "w2", "n": [1, 2]}]
    with lookup.given(inputs.objects):
        assert read_rows(config.dataset) == [{"q": "w2w2", "n": [1, 2]}]
        assert read_rows(config.evaluation.dataset) == [{"q": "w3w3"}]
