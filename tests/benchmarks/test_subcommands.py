"""Each subcommand on a CPU, in miniature, from the command line to the record."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace

import pytest
import torch
import yaml

from benchmarks import bias, group, kernels, quickstart, step, train
from benchmarks.__main__ import main
from benchmarks.group import Probe, run_probe, search
from benchmarks.measure import FAILED, OK, OOM, SKIPPED, preload
from benchmarks.models import ARCHITECTURES, make_policy
from benchmarks.problem import PRODUCT
from benchmarks.record import Measurement
from benchmarks.trl_recipe import train_with_trl
from grpo_fast import cli
from grpo_fast.config.policy import ModelConfig
from tests.benchmarks.conftest import by_name
from tests.head.selection import sampling_without_kernels

TOY = ModelConfig(path="toy", dtype="float32", device="cpu")
PROBE = Probe("ours", TOY, layers=1, prompt=4, completion=4, budget=1 << 34)


def test_an_update_is_the_same_for_all_implementations(run):
    pytest.importorskip("trl")
    record = run("step", "--model", "toy", "--prompts", "2", "--group", "2", "--micro-batch-tokens", "300")

    found = by_name(record)
    assert {name: found[name].status for name in step.IMPLEMENTATIONS} == {"ours": OK, "TRL": OK}, (
        record.cells
    )
    ours = found["ours"]
    # float32 sums in another order: 1e-6 relative, with three digits to spare.
    assert found["TRL"].metrics["loss"] == pytest.approx(ours.metrics["loss"], rel=1e-3, abs=1e-6)
    assert found["TRL"].metrics["grad_norm"] == pytest.approx(ours.metrics["grad_norm"], rel=1e-3)
    assert found["TRL"].metrics["tokens"] == ours.metrics["tokens"] == ours.shape["tokens"] > 0
    for one in found.values():
        assert {"forward", "head and loss", "backward", "optimizer"} <= set(one.phases)


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
    record = run("train", *sizes, "--steps", "2", "--repeats", "2")

    for name in ("ours", "TRL"):
        found = by_name(record)[name]
        assert (found.status, found.reason) == (OK, "")
        assert len(found.seconds) == 2 * 2  # in two turns, without the first step of either
        assert found.peak_bytes == 1 << 20
        assert {"generate", "reward", "update"} <= set(found.phases)
        assert 0 < found.metrics["tokens"] <= 2 * 2 * 4


# The largest group


@pytest.fixture
def searched(monkeypatch):
    """What a search finds where so many completions fit, and the sizes that it tried."""

    def searched(limit: int, largest: int = 1024, seconds: float = 60.0):
        sizes: list[int] = []

        def attempt(probe: Probe, shape: dict[str, object]) -> Measurement:
            sizes.append(probe.size)
            return Measurement(probe.implementation, shape, OK if probe.size <= limit else OOM)

        monkeypatch.setattr(group, "run_probe", attempt)
        return search(PROBE, {}, largest, time.monotonic() + seconds), sizes

    return searched


def test_the_largest_group_that_fits_is_found_in_few_tries(searched, seed):
    limit = random.Random(seed).randint(2, 1024)

    found, sizes = searched(limit)

    assert found.metrics == {"largest_group": limit}
    assert bool(found.reason) == (limit == 1024)
    assert len(sizes) == len({*sizes}) <= 20  # ten doublings, ten halvings
    assert searched(limit=10**6, largest=24)[1] == [2, 4, 8, 16, 24]
    assert searched(limit=1)[0].reason == "not even two fit"
    assert searched(limit=9, seconds=0)[0].status == SKIPPED


def test_a_try_runs_in_a_process_and_exceeding_the_budget_is_its_outcome():
    preload(step.__name__)
    probe = replace(PROBE, size=2)

    fits = run_probe(probe, {})

    assert fits.status == OK and fits.peak_bytes > 1 << 20
    assert run_probe(replace(probe, budget=1 << 20), {}).status == OOM
    broken = run_probe(replace(probe, model=TOY.model_copy(update={"path": "no such"})), {})
    assert broken.status == FAILED and "no such" in broken.reason


# The head's kernels and its gradient


def test_the_kernels_of_a_step_are_measured_beside_the_product(run, monkeypatch):
    monkeypatch.setattr(kernels, "_LEAST_SHARE", 0.0)
    record = run("kernels", "--tokens", "32", "--hidden", "16", "--vocab", "300", "--rows", "peaked")

    for profiled in ("ours", "ours, tolerance 0"):
        cells = [cell for cell in record.cells if cell.shape["profiled"] == profiled]
        names = [cell.implementation for cell in cells]
        assert names[0] == PRODUCT and names[-1] == kernels.IDLE and "aten::mm" in names
        assert len(cells[0].seconds) == 3 and all(cell.metrics["launches"] >= 1 for cell in cells[1:-1])


def test_sampled_gradients_are_unbiased_and_dropped_ones_add_up(tmp_path, monkeypatch, seed):
    peaked = {"vocab_size": 4000, "initializer_range": 0.8}
    monkeypatch.setitem(ARCHITECTURES, "peaked", ("llama", ARCHITECTURES["toy"][1] | peaked))
    make_policy(TOY.model_copy(update={"path": "peaked"})).save_pretrained(tmp_path)
    prompts = [f'{{"prompt": "{a}{b}"}}\n' for a in "abcd" for b in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))

    rows = bias.rows_of(str(tmp_path), str(tmp_path / "prompts.jsonl"), torch.device("cpu"), seed)
    batches = {n: bias.draw(*rows, n, seed) for n in (64, 1024)}
    with sampling_without_kernels():
        few, many = (bias.compare(batch, {"tokens": n}, 40) for n, batch in batches.items())

    assert [cell.implementation for cell in few] == ["ours", "rounded to bfloat16", "dropped"]
    assert 0 < few[0].metrics["density"] < 0.9
    assert 0.8 < few[0].metrics["bias"] < 1.25  # were they dropped, 40
    assert many[0].accuracy["behind"] < 3 * few[0].accuracy["behind"]
    assert many[2].accuracy["behind"] > 3 * many[0].accuracy["behind"]


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


def test_both_trainers_run_a_recipe_with_the_same_settings(toy, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    monkeypatch.setattr(quickstart, "in_a_process", lambda _, call, *given: (call(*given), 0))
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "record.json"
    trained = {
        **toy,
        "max_steps": 2,
        "threads": 1,
        "evaluation": {**toy["evaluation"], "every": 1, "size": 5},
    }
    recipe.write_text(yaml.safe_dump(trained | {"dataset": {**toy["dataset"], "chat": False}}))
    given = ["--recipe", str(recipe), "--trainer", "ours", "TRL", "--part", "as it is", "our head"]

    assert (
        main(["quickstart", *given, "--seeds", "3", "--rows", "12", "--json", str(out), "--reach", "2"]) == 0
    )

    runs = json.loads(out.read_text())["runs"]
    assert [(run["trainer"], run["part"]) for run in runs] == [
        ("ours", "as it is"),
        ("TRL", "as it is"),
        ("TRL", "our head"),
    ]
    assert runs[0]["before"]["score"] == runs[1]["before"]["score"]  # the same weights and questions
    # The exact head of ours changes nothing of what TRL computes.
    assert runs[1]["scores"][-1]["score"] == runs[2]["scores"][-1]["score"]
    for run in runs:
        assert [(score["step"], score["n"]) for score in run["scores"]] == [(0, 10), (1, 5), (2, 10)]
        assert 0 < run["phases"]["generate"] < run["seconds_of_a_step"] < run["seconds_training"]
        assert run["steps"] == 2 and run["peak_bytes"] > 0 and run["arithmetic"].startswith("float32")
    assert capsys.readouterr().out.count("not reached") == 3


def test_what_trl_does_not_do_alike_is_refused(toy, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(toy | {"minibatches": 2}))

    with pytest.raises(ValueError, match="not given minibatches"):
        train_with_trl(str(recipe), [], 12)
    with pytest.raises(ValueError, match="--rows 7 must divide the 24 completions"):
        train_with_trl(str(recipe), ["minibatches=1"], 7)
