"""The command line as a person meets it: output, exit codes, and one real process."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import grpo_fast
from grpo_fast import cli
from grpo_fast.cli import commands, questions
from grpo_fast.config.load import load_config

MINIMAL = "model: {path: some/model}\ndataset: {source: rows.jsonl}\nrewards: [{reward: exact_match}]\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return str(path)


def leave(*arguments: str) -> int:
    """The exit code, however the command leaves."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.parametrize(
    ("before", "policy", "spins"),
    [
        ("", "passive", "1000"),
        ("os.environ['OMP_WAIT_POLICY'] = 'active'", "active", None),
        ("os.environ['GOMP_SPINCOUNT'] = '7'", None, "7"),
        ("sys.modules['torch'] = object()", None, None),  # which has read the environment
    ],
)
def test_openmp_threads_wait_passively_unless_the_user_says(before: str, policy: str, spins: str):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    code = f"import os, sys\n{before}\nimport grpo_fast\nprint([os.environ.get(n) for n in {names}])"
    environment = {name: value for name, value in os.environ.items() if name not in names}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert done.stdout == f"{[policy, spins]}\n", done.stderr


def test_neither_help_nor_a_wrong_configuration_waits_for_torch():
    code = "import sys; from grpo_fast.cli import main; sys.argv = ['grpo-fast', '--help']\n"
    code += "try: main()\nexcept SystemExit: print([m for m in ('torch', 'yaml') if m in sys.modules])\n"
    code += "assert main(['train', 'nowhere.yaml']) == main(['train', 'gsm8k', 'max_steps=0']) == 2\n"
    code += "assert main(['config', 'rollout']) == 0 and 'torch' not in sys.modules"
    options = {"capture_output": True, "text": True, "timeout": 600}

    done = subprocess.run([sys.executable, "-c", code], check=True, **options)

    assert all(name in done.stdout for name in ("train", "eval", "preview", "export", "doctor"))
    assert "\n[]\n" in done.stdout
    command = [sys.executable, "-m", "grpo_fast", "train", "gsm8k", "optimizer.learning_rat=1"]
    done = subprocess.run(command, check=False, **options)
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    assert "did you mean optimizer.learning_rate" in done.stderr


COMMANDS = ["train", "eval", "preview", "plan", "export", "report", "convert", "config", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_is_there(command, capsys):
    assert leave(command, "--help") == 0
    assert f"grpo-fast {command}" in capsys.readouterr().out
    _, parsers = cli.build_parser()
    module, _, name = parsers[command].get_default("command").partition(":")
    assert callable(getattr(importlib.import_module(f"grpo_fast.cli.{module}"), name))


def test_what_the_outputs_encoding_has_not_is_printed_as_an_escape(config, monkeypatch):
    page = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(page, encoding="ascii"))
    assert leave("train", config, "output_dir=Läufe→1", "--print-config") == 0
    sys.stdout.flush()
    assert b"output_dir: L\\xe4ufe\\u21921" in page.getvalue()


def test_print_config_shows_the_whole_configuration_and_reads_it(config, tmp_path, capsys):
    assert leave("train", config, "num_generations=4", "--print-config", "--seed", "7") == 0
    printed = capsys.readouterr().out
    tree = yaml.safe_load(printed)
    assert (tree["rollout"]["num_generations"], tree["seed"], tree["loss"]["loss_type"]) == (4, 7, "dapo")
    assert tree["micro_batch_tokens"] == 16_384  # what `auto` becomes here
    (tmp_path / "printed.yaml").write_text(printed, encoding="utf-8")
    assert leave("train", str(tmp_path / "printed.yaml"), "--print-config") == 0
    assert capsys.readouterr().out == printed


USAGE = yaml.safe_load(Path(__file__).with_name("usage.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", USAGE, ids=lambda case: " ".join(case["arguments"]))
def test_wrong_usage_exits_with_2_and_says_what_may_have_been_meant(case, capsys):
    assert leave(*case["arguments"]) == 2
    assert case["says"] in capsys.readouterr().err


def test_a_failure_is_one_sentence_and_code_1_and_debug_shows_the_traceback(tmp_path, capsys):
    assert leave("export", str(tmp_path), str(tmp_path / "out")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("grpo-fast: ") and str(tmp_path) in shown and "Traceback" not in shown
    assert leave("--debug", "export", str(tmp_path), str(tmp_path / "out")) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"), [(KeyboardInterrupt, 130, "interrupted"), (KeyError, 1, "KeyError: ")]
)
def test_an_interruption_and_an_unexpected_error_have_their_codes(monkeypatch, capsys, error, code, said):
    def broken(args: argparse.Namespace, overrides: list[str]) -> int:
        raise error

    monkeypatch.setattr(commands, "report", broken)
    assert leave("report", "runs/x") == code
    shown = capsys.readouterr().err
    assert said in shown and ("--debug" in shown) == (code == 1)


@pytest.mark.parametrize(
    ("command", "tokens", "own", "overrides"),
    [
        ("train", ["c", "a.b=1", "--verbose"], ["c", "--verbose"], ["a.b=1"]),
        ("train", ["--a.b", "-1", "c"], ["c"], ["--a.b", "-1"]),
        ("train", ["c", "--a.b=1"], ["c"], ["--a.b=1"]),
        ("train", ["c", "--resume", "runs/x", "a=1"], ["c", "--resume", "runs/x"], ["a=1"]),
        ("train", ["c", "--resume", "a=1"], ["c", "--resume"], ["a=1"]),
        ("eval", ["c", "--output", "a=b.json", "x=1"], ["c", "--output", "a=b.json"], ["x=1"]),
    ],
)
def test_overrides_are_split_from_the_options_of_a_command(command, tokens, own, overrides):
    _, parsers = cli.build_parser()
    assert cli.split_overrides(parsers[command], tokens) == (own, overrides)


def test_several_answers_take_the_rollouts_temperature_if_greedy(config):
    loaded = load_config(config, ["temperature=0.8"])
    assert questions.evaluation_sampling(loaded, 1).temperature == 0
    assert questions.evaluation_sampling(loaded, 4).temperature == 0.8


def test_convert_refuses_a_configuration_of_ours(config, capsys):
    assert leave("convert", config) == 2
    assert "`grpo-fast train` takes it as it is" in capsys.readouterr().err


def test_a_checkout_that_is_not_installed_has_its_commands(monkeypatch, capsys):
    assert leave("--version") == leave("--version", "train", "no.yaml") == 0
    assert capsys.readouterr().out == 2 * f"grpo-fast {grpo_fast.__version__}\n"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert leave("--version") == cli.main(["config", "max_steps"]) == 0
    shown = capsys.readouterr().out
    assert "pip install ." in shown and "max_steps" in shown
