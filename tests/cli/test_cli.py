"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_fast import cli
from grpo_fast.cli import commands
from grpo_fast.config_io import load_config

MINIMAL = "model: {path: some/model}\ndataset: {source: rows.jsonl}\nrewards: [{reward: exact_match}]\n"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_fast", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return str(path)


def test_help_names_every_command_and_imports_nothing_heavy():
    code = "import sys; from grpo_fast.cli import main; sys.argv = ['grpo-fast', '--help']\n"
    code += "try: main()\nexcept SystemExit: print([m for m in ('torch', 'yaml') if m in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )

    assert all(name in done.stdout for name in ("train", "eval", "generate", "preview", "export", "doctor"))
    assert done.stdout.rstrip().endswith("[]")


@pytest.mark.parametrize(
    "command", ["train", "eval", "generate", "preview", "export", "report", "convert", "doctor"]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert f"grpo-fast {'generate' if command == 'preview' else command}" in capsys.readouterr().out


def test_print_config_shows_the_whole_configuration_with_the_overrides_and_prints_itself(
    config, tmp_path, capsys
):
    assert cli.main(["train", config, "--print-config", "beta=0.5", "--rollout.num_generations", "4"]) == 0
    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)
    assert (shown["loss"]["beta"], shown["rollout"]["num_generations"]) == (0.5, 4)
    assert shown["checkpoint"]["keep"] == 2

    again = tmp_path / "again.yaml"
    again.write_text(printed, encoding="utf-8")
    cli.main(["train", str(again), "--print-config"])
    assert capsys.readouterr().out == printed


def test_a_bad_key_leaves_with_code_2_and_the_nearest_name(config):
    done = run("train", config, "optimizer.learning_rat=1")

    assert done.returncode == 2
    assert "did you mean optimizer.learning_rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback(config, capsys):
    assert cli.main(["--debug", "train", config, "optimizer.learning_rat=1"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "quickstrat"], "quickstart"),
        (["train", "mine.yaml"], "dpo, gsm8k, quickstart, rank"),
        (["trian"], "did you mean train?"),
        (["improve"], "train, eval"),
        (["eval", "quickstart", "--k", "0"], "--k"),
        (["eval", "quickstart", "--k", "8", "--num-samples", "4"], "--num-samples"),
        (["train", "quickstart", "max_steps", "3"], "max_steps 3"),
    ],
)
def test_a_wrong_word_is_answered_by_what_may_have_been_meant(arguments, named, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code

    assert code == 2
    assert named in capsys.readouterr().err


def test_a_failure_is_one_sentence_and_code_1(tmp_path):
    done = run("export", str(tmp_path), str(tmp_path / "out"))

    assert done.returncode == 1
    assert done.stderr.startswith("grpo-fast: ") and str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


WRONG = [["train"], ["train", "quickstart", "--print-confg"], ["eval"], ["doctor", "--jsn"], []]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_leaves_with_code_2(arguments, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code

    assert code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"), [(KeyboardInterrupt, 130, "interrupted"), (KeyError, 1, "KeyError: ")]
)
def test_an_interruption_and_an_unexpected_error_have_their_codes(monkeypatch, capsys, error, code, said):
    def broken(args: argparse.Namespace, overrides: list[str]) -> int:
        raise error

    monkeypatch.setattr(commands, "report", broken)
    assert cli.main(["report", "runs/x"]) == code
    shown = capsys.readouterr().err
    assert said in shown and ("--debug" in shown) == (code == 1)


@pytest.mark.parametrize(
    ("tokens", "own", "overrides"),
    [
        (["c", "a.b=1", "--plain"], ["c", "--plain"], ["a.b=1"]),
        (["--a.b", "-1", "c"], ["c"], ["--a.b", "-1"]),
        (["c", "--a.b=1"], ["c"], ["--a.b=1"]),
        (["c", "--resume", "runs/x", "a=1"], ["c", "--resume", "runs/x"], ["a=1"]),
        (["c", "--resume", "a=1"], ["c", "--resume"], ["a=1"]),
    ],
)
def test_overrides_are_told_from_the_commands_own_options(tokens, own, overrides):
    _, parsers = cli.build_parser()
    assert parsers["train"].split_overrides(tokens) == (own, overrides)


def test_the_value_of_an_option_may_look_like_an_override():
    _, parsers = cli.build_parser()
    own, overrides = parsers["eval"].split_overrides(["c", "--output", "a=b.json", "x=1"])
    assert (own, overrides) == (["c", "--output", "a=b.json"], ["x=1"])


def test_eval_without_a_configuration_takes_model_dataset_and_reward():
    args = argparse.Namespace(config=None, model="m", dataset="rows.jsonl", reward="exact_match")

    config = commands.evaluation_config(args, ["max_completion_length=7"])

    assert (config.model.path, config.dataset.source) == ("m", "rows.jsonl")
    assert config.rewards[0].reward == "exact_match"
    assert config.rollout.max_completion_length == 7


def test_several_answers_take_the_rollouts_temperature_where_evaluation_is_greedy(config):
    loaded = load_config(config, ["temperature=0.8"])
    assert commands.evaluation_sampling(loaded, 1).temperature == 0
    assert commands.evaluation_sampling(loaded, 4).temperature == 0.8


def test_a_configuration_of_ours_is_not_converted(config, capsys):
    assert cli.main(["convert", config]) == 2
    assert "`grpo-fast train` takes it as it is" in capsys.readouterr().err


def test_convert_writes_a_configuration_that_train_accepts(tmp_path):
    source, out = tmp_path / "trl.json", tmp_path / "ours.yaml"
    source.write_text(json.dumps({"num_generations": 4, "beta": 0.04, "max_steps": 10}), encoding="utf-8")

    converted = run("convert", str(source), "-o", str(out))
    printed = run("train", str(out), "--print-config")

    assert converted.returncode == 0, converted.stderr
    assert "renamed: beta = 0.04 -> loss.beta" in converted.stderr
    assert yaml.safe_load(printed.stdout)["loss"]["beta"] == 0.04
