"""Training from Python: the run of a file, what its folder says of objects, and the run as an object."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM

import grpo_fast
from grpo_fast import run
from grpo_fast.config.load import load_config
from grpo_fast.config.lookup import load_callable
from grpo_fast.config.schema import TrainConfig
from grpo_fast.record.checkpoint import CheckpointError
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


@pytest.fixture
def moved(finished: grpo_fast.Run, tmp_path: Path) -> Path:
    """The finished run in another place; its configuration still has the paths of the first."""
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))


def test_objects_make_the_same_run_as_their_names_in_a_file(finished: grpo_fast.Run, toy, tmp_path: Path):
    changes = {"max_steps": 2, "checkpoint": {"every": 1}, "output_dir": str(tmp_path / "run")}
    run.train(TrainConfig(**{**toy, **changes}), display=False)

    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert (finished.folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_the_folder_says_what_each_object_was(finished: grpo_fast.Run, call):
    config = load_config(finished.folder)
    reward, source = config.rewards[0].reward, Path(config.dataset.source)

    assert reward.startswith(f"{__name__}:near_w7@")
    kept = finished.folder / "inputs" / f"near_w7-{reward.partition('@')[2]}.py"
    assert "1 / (1 + abs(n - 7))" in kept.read_text()
    assert source.parent == finished.folder / "inputs"
    assert [json.loads(line) for line in source.read_text().splitlines()] == call["dataset"].to_list()
    with pytest.raises(ValueError, match=r"near_w7@.*was an object of a Python program"):
        load_callable(reward, "reward")


def test_the_run_has_tables_a_report_and_a_page_for_a_cell(finished: grpo_fast.Run):
    metrics, evaluations = finished.metrics, finished.evaluations

    assert list(metrics.index) == [0, 1, 2] and metrics.loc[2, "time/step"] > 0
    assert list(evaluations["step"]) == [0, 2] and list(evaluations["n"]) == [10, 10]
    assert finished.report.name == "report.html"
    assert "step 2 of 2, held-out score" in repr(finished)
    assert "<iframe" in finished._repr_html_()
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no config\.yaml"):
        grpo_fast.Run(finished.folder / "inputs")


def test_the_trained_policy_answers_and_is_saved(finished: grpo_fast.Run, tmp_path: Path):
    policy = finished.policy
    prompts = ["w2 w13 w3 w4", "w3"]

    greedy = policy.generate(prompts)
    drawn = policy.generate(prompts, temperature=1.0, max_completion_length=3, seed=1)
    policy.save_pretrained(tmp_path / "saved")

    assert greedy == policy.generate(prompts) and len(greedy) == 2
    assert all(len(completion.token_ids) <= 3 for completion in drawn)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.vocab_size == policy.model.vocab_size and policy.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("w2", {}, "is one prompt; give a list"),
        ([{"role": "user", "content": "w2"}], {}, "is one prompt; give a list"),
        (["w2"], {"max_tokens": 3}, "max_tokens"),
        (["w2"], {"temperature": -1.0}, r"temperature\s+Input should be greater than or equal to 0"),
        ([3], {}, "must be text or a list of messages"),
    ],
)
def test_prompts_and_settings_that_cannot_be_generated_from_are_refused(
    finished: grpo_fast.Run, prompts: Any, sampling: dict[str, Any], message: str
):
    with pytest.raises((TypeError, ValueError), match=message):
        finished.policy.generate(prompts, **sampling)


def test_the_same_call_resumes_and_other_objects_are_refused(call, moved: Path):
    def other(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    again = call | {"output_dir": moved, "max_steps": 3}
    with pytest.raises(CheckpointError, match="resume=True"):
        grpo_fast.train(**again)
    with pytest.raises(CheckpointError, match="dataset"):
        grpo_fast.train(**again | {"dataset": call["dataset"].to_list()[1:]}, resume=True)
    with pytest.raises(CheckpointError, match="rewards"):
        grpo_fast.train(**again | {"rewards": [other]}, resume=True)

    resumed = grpo_fast.train(**again | {"dataset": call["dataset"].to_list()}, resume=True)

    assert list(resumed.metrics.index) == [0, 1, 2, 3]


def test_an_edited_object_needs_a_word_to_go_on(call, moved: Path):
    def near_w7(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    near_w7.__qualname__ = "near_w7"
    again = call | {"output_dir": moved, "max_steps": 3, "rewards": [near_w7]}
    with pytest.raises(CheckpointError, match=r"other code \(rewards.0.reward = .*near_w7@.* has changed"):
        grpo_fast.train(**again, resume=True)

    resumed = grpo_fast.train(**again, resume=True, changed_code=True)

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
        ({"model": 3}, r"model: is a int: give a folder or hub id"),
        ({"dataset": []}, "dataset: has no rows"),
        ({"dataset": 3}, "dataset: is a int"),
        ({"dataset": ["w2"]}, r"dataset\[0\]: is a str \('w2'\): a row is a dict"),
        ({"dataset": [{"prompt": "w2"}, {"prompt": object()}]}, r"dataset\[1\]\['prompt'\]: holds <object"),
        ({"dataset": [{"prompt": "w2", "x": float("nan")}]}, r"dataset\[0\]\['x'\]: holds nan"),
        ({"dataset": DatasetDict(train=Dataset.from_list([{"prompt": "w2"}]))}, "one of 'train'"),
        ({"dataset": {"source": [{"prompt": "w2"}], "promt_column": "p"}}, "mean dataset.prompt_column"),
        ({"evaluation": [1]}, r"evaluation.dataset\[0\]: is a int"),
        ({"rewards": [3]}, r"rewards\.0\.reward = 3: should be a valid string"),
        ({"rewards": [{"reward": near_w7, "wieght": 1}]}, r"did you mean rewards\.0\.weight"),
        ({"max_step": 3}, "did you mean max_steps"),
        ({"rewards": lambda completions, answer: answer}, "evaluation: reward 'lambda' asks for 'answer'"),
        ({"learning_rate": 1e-6, "optimizer": {"learning_rate": 1e-5}}, "given twice"),
    ],
)
def test_what_cannot_be_trained_with_is_refused_by_name(
    call, tmp_path: Path, changes: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        grpo_fast.train(**call | {"output_dir": tmp_path / "run"} | changes)


def test_each_object_has_a_name_of_its_own_that_others_do_not_change():
    one, other = Near(1), Near(2)
    first, second = Inputs(), Inputs()
    lambdas = [lambda completions: completions, lambda completions: 2 * completions]
    partials = [partial(near_w7, a=1), partial(near_w7, a=2)]
    objects: list[Any] = [one, other, *partials, *lambdas, Near]

    names = [first.name(value) for value in objects]

    assert len(set(names)) == len(objects)
    assert names == [second.name(value) for value in objects]
    assert [first.objects[name] for name in names] == objects
    assert Inputs().name(len).endswith("@no source")


def test_a_loss_of_the_users_is_an_object_too(call, tmp_path: Path):
    def mine(inputs: grpo_fast.LossInputs) -> grpo_fast.LossOutputs:
        own = inputs.logprobs[inputs.loss_mask]
        return grpo_fast.LossOutputs(-own.mean(), {"mine": own.detach().mean()})

    trained = grpo_fast.train(**call | {"output_dir": tmp_path / "run", "max_steps": 1, "loss_type": mine})

    assert trained.metrics["mine"].notna().sum() == 1


def test_held_out_rows_are_read_as_the_datasets_are(tmp_path: Path):
    inputs = Inputs()
    settings = {"model": {"path": "m"}, "rewards": [{"reward": "length"}], "output_dir": str(tmp_path)}
    settings["dataset"] = inputs.dataset({"source": [{"q": "w2"}], "prompt_column": "q", "size": 1})
    settings["evaluation"] = inputs.evaluation([{"q": "w3"}])

    config = inputs.placed(load_config(None, settings), like_dataset=True)

    assert config.evaluation.dataset is not None
    assert config.evaluation.dataset.prompt_column == "q" and config.evaluation.dataset.size is None
    assert Path(config.evaluation.dataset.source).parent == tmp_path / "inputs"
