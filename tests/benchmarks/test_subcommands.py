"""Each subcommand on a CPU, in miniature, from the command line to the record."""

from __future__ import annotations

import sys

import pytest

from benchmarks import quickstart, step, train
from benchmarks.__main__ import main
from benchmarks.measure import OK
from grpo_fast import cli
from tests.benchmarks.conftest import by_name


def test_an_update_is_the_same_for_all_implementations(run):
    pytest.importorskip("trl")
    record = run("step", "--model", "toy", "--prompts", "2", "--group", "2", "--micro-batch-tokens", "300")

    found = by_name(record)
    ours = found["ours"]
    for name in step.IMPLEMENTATIONS:
        assert found[name].status == OK
        # float32 sums in another order: 1e-6 relative, with three digits to spare.
        assert found[name].metrics["loss"] == pytest.approx(ours.metrics["loss"], rel=1e-3, abs=1e-6)
        assert found[name].metrics["grad_norm"] == pytest.approx(ours.metrics["grad_norm"], rel=1e-3)
        assert found[name].metrics["tokens_per_second"] > 0
        assert {"forward", "head and loss", "backward", "optimizer"} <= set(found[name].phases)


def test_an_engines_cycle_is_timed_phase_by_phase(run):
    record = run("rollout", "--model", "toy", "--group", "3", "--completion", "4", "--impl", "transformers")

    found = by_name(record)["transformers"]
    assert found.status == OK
    assert set(found.phases) == {"generate", "sleep", "sync", "wake"}
    assert 0 < found.metrics["tokens"] <= 2 * 3 * 4


def test_whole_steps_of_both_trainers_have_phases(run, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(train, "in_a_process", lambda _, call, *given: (call(*given), 1 << 20))
    sizes = ["--prompts", "2", "--group", "2", "--prompt", "4", "--completion", "4"]
    record = run("train", *sizes, "--steps", "2", "--repeats", "1")

    for name in ("ours", "TRL"):
        found = by_name(record)[name]
        assert (found.status, found.reason) == (OK, "")
        assert len(found.seconds) == 2 * 2  # in two turns, without the first step of either
        assert found.memory.driver == 1 << 20
        assert {"generate", "reward", "update"} <= set(found.phases)
        assert 0 < found.metrics["tokens"] <= 2 * 2 * 4
        assert ("planned_bytes" in found.metrics) == (name == "ours")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --device cpu --group 1", "--group must be at least 2"),
        ("group --device cpu --memory -1", "--memory must be above 0 GiB"),
        ("kernels --device cpu --rows histogram", "--rows histogram needs --histogram FILE"),
        ("head --device cpu --rows histogram", "--rows histogram needs --histogram FILE"),
        ("head --device cpu --rows real", "--rows real needs --real-rows FILE"),
        ("head --device cpu --real-rows absent.safetensors", "absent.safetensors cannot be read"),
        ("head --device cpu --impl nobody", "--impl 'nobody' is part of no implementation's name"),
        ("bias --rows nowhere --tokens 284 1136 --batches 3", "one for each of the 2 --tokens, and a last"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_the_quickstarts_runs_are_commands_that_the_command_line_takes(monkeypatch, capsys):
    def shown(command: list[str], check: bool) -> None:
        assert command[:4] == [sys.executable, "-m", "grpo_fast", "train"] and check
        assert cli.main(["train", "--print-config", *command[4:]]) == 0
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart.subprocess, "run", shown)

    with pytest.raises(KeyboardInterrupt):
        quickstart.run_recipe("quickstart", 7, ["max_steps=3"])

    printed = capsys.readouterr().out
    assert "seed: 7" in printed and "max_steps: 3" in printed
