"""A run with an environment, from its configuration to its report: what each part makes of several turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo_fast
from grpo_fast.cli import main
from grpo_fast.config.lookup import given, load_callable
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data import Prompt
from grpo_fast.environments import make_rollout
from grpo_fast.rollout import Completion, Episode, Sampling
from grpo_fast.run import build_trainer, train

SHORT = {"reward": "length", "options": {"target": 4}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(playing_toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TrainConfig(**playing_toy, output_dir=str(tmp_path_factory.mktemp("run") / "run"))
    return train(config, display=False).run_dir


def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    playing_toy, finished: Path, tmp_path: Path
):
    stopped = TrainConfig(**playing_toy, output_dir=str(tmp_path))
    train(stopped.model_copy(update={"max_steps": 1}), display=False)
    train(stopped, display=False, resume="latest")

    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert (finished / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_a_run_counts_turns_and_calls_and_keeps_its_clock_apart(finished: Path):
    metrics, timings, samples = (lines(finished / f"{n}.jsonl") for n in ("metrics", "timings", "samples"))

    assert metrics[1]["turns/mean"] > 1 and metrics[1]["tools/calls"] > 0 < metrics[1]["tools/failures"] < 1
    assert "reward/Guess/mean" in metrics[1] and "reward/patience/mean" in metrics[1]
    assert timings[0]["environment/seconds"] > 0 and "environment/seconds" not in metrics[1]
    for sample in samples:
        answers = [turn["content"] for turn in sample["messages"] if turn["role"] == "tool"]
        assert sample["rewards"]["Guess"] == 1.0 or "w3" not in answers
        assert sample["rewards"]["patience"] >= sum(answer[0] == "w" for answer in answers) / 10 - 1e-6


def test_people_read_who_said_what(
    finished: Path, playing_toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = (finished / "report.html").read_text()
    assert '<span class="tag">tool guess</span>' in page and "guess(number=" in page

    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(playing_toy))
    assert main(["preview", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "\n  tool guess\n  | " in shown and "guess(number=" in shown and "Guess 0.000" in shown


def test_stages_bring_their_own_tools_and_evaluation_keeps_those_of_the_run(playing_toy, tmp_path: Path):
    single = {"rollout": {"environment": None, "max_turns": None}, "rewards": [SHORT]}
    stages = [{"name": "single", "steps": 1, "overrides": single}, {"name": "several"}]
    train(TrainConfig(**playing_toy, stages=stages, output_dir=str(tmp_path)), display=False)

    first, second = lines(tmp_path / "metrics.jsonl")[1:]
    assert "turns/mean" not in first and "reward/length/mean" in first
    assert second["turns/mean"] > 1 and "reward/Guess/mean" in second
    plain, told = (sample for sample in lines(tmp_path / "samples.jsonl") if sample["group"] == 1)
    assert plain["messages"] is None and "guess" not in plain["prompt"] and told["prompt"].startswith("guess")
    assert [one["n"] for one in lines(tmp_path / "evaluations.jsonl")] == [4, 4, 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {}}, "reward 'patience' asks for 'environments'.*set rollout.environment"),
        ({"rollout": {"environment": {"a": "OWN:Guess"}}}, "row 0: the column 'environment' has None"),
        ({"rollout": {"environment": "OWN:Mute"}, "rewards": []}, "rewards is empty.* with a method get_rew"),
        ({"dataset": {"source": "ROWS", "rename": {"start": "begin"}}}, "'start'. Its columns are begin"),
        (
            {"dataset": {"source": "x", "overlong_prompts": "truncate"}},
            "'truncate' would cut the tools'",
        ),
        ({"algorithm": "dpo", "rewards": []}, "is not read by algorithm = 'dpo'"),
    ],
)
def test_a_run_that_could_not_play_is_refused_at_its_start(playing_toy, changes, said: str):
    text = json.dumps(playing_toy | {"evaluation": {}} | changes)
    text = text.replace("ROWS", playing_toy["dataset"]["source"])
    own = playing_toy["rollout"]["environment"].rpartition(":")[0]
    with pytest.raises((ValueError, RuntimeError), match=said):
        build_trainer(TrainConfig(**json.loads(text.replace("OWN", own))))


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: any
    """
    return 2 * number


def test_a_python_program_gives_tools_and_environments_as_objects(playing_toy, tmp_path: Path):
    environment = load_callable(playing_toy["rollout"]["environment"], "rollout.environment")
    rollout = playing_toy["rollout"] | {"tools": [double], "environment": environment}
    call = {key: playing_toy[key] for key in ("model", "prompts_per_step", "logging")}
    call |= {"dataset": [{"prompt": "w1 w2", "start": 1}] * 4, "rollout": rollout, "max_steps": 1}
    run = grpo_fast.train(**call, output_dir=tmp_path / "run", display=False)

    assert run.metrics.loc[1, "reward/Guess/mean"] == run.metrics.loc[1, "reward/mean"] > 0
    assert str(run.config.rollout.environment).startswith(f"{environment.__module__}:Guess@")
    assert run.config.rollout.tools[0].startswith(f"{__name__}:double@")
    assert run.policy.generate(["w1"])[0].episode is None


PROMPTS = [Prompt(i, f"question {i}", (1, 2), {}) for i in range(2)]
ONE = Completion((7, 8), (-1.0, -2.0), "", False)
PLAYED = Episode("", (1,), (True,), ())


def test_a_rollout_of_ones_own_answers_each_prompt_as_often_as_asked():
    def answers(engine: Any, prompts: Any, sampling: Sampling) -> list[Completion]:
        return [replace(ONE, text=prompt.prompt) for prompt in prompts]

    with given({"m:f": answers}):
        rollout = make_rollout(RolloutConfig.model_validate("m:f"), None, None, ())
    groups = rollout(None, PROMPTS, 3, Sampling(4))
    assert [[c.text for c in group] for group in groups] == [["question 0"] * 3, ["question 1"] * 3]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "a NoneType for 2 prompts; return a list"),
        ([ONE], "1 completions for 2 prompts"),
        ([ONE, "text"], "at place 1, a str; return a grpo_fast.rollout.Completion"),
        ([replace(ONE, token_ids=(), logprobs=()), ONE], "at place 0, 0 tokens, 0 of them sampled"),
        ([ONE, replace(ONE, token_ids=(7,) * 5)], "5 tokens.* at most sampling.max_completion_length = 4"),
        ([ONE, replace(ONE, logprobs=None)], "no logprobs"),
        ([ONE, replace(ONE, logprobs=(-1.0,))], "1 logprobs for 2 tokens"),
        ([ONE, replace(ONE, episode=PLAYED)], "1 sampled for 2 tokens"),
    ],
)
def test_what_a_rollout_of_ones_own_returns_is_checked(found: Any, said: str):
    with given({"m:f": lambda engine, prompts, sampling: found}), pytest.raises(ValueError, match=said):
        make_rollout(RolloutConfig(function="m:f"), None, None, ())(None, PROMPTS, 1, Sampling(4))
