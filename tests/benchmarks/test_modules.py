"""The other benchmarks on a CPU, in miniature, from the command line to the record, and their processes."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

from benchmarks import measure, test_bias, test_group, test_recipe, test_train
from benchmarks.measure import Failure, Stopwatch, in_a_process, preload
from benchmarks.models import ARCHITECTURES, make_policy
from benchmarks.rows import rows_of
from benchmarks.test_group import Probe, run_probe, search
from benchmarks.trainers import train_with_trl
from grpo_fast import cli
from grpo_fast.config.policy import ModelConfig
from tests.head.selection import sampling_without_kernels

CPU = torch.device("cpu")
TOY = ModelConfig(path="toy", dtype="float32", device="cpu")
PROBE = Probe("ours", TOY, layers=1, prompt=4, completion=4, budget=1 << 34)


def test_an_update_is_the_same_for_all_implementations(run):
    pytest.importorskip("trl")
    rows = run("step", "--model=toy", "--dtype=float32", "--sizes=prompts=2,group=2,micro_batch_tokens=300")

    ours, trl = (rows[name]["extra_info"] for name in ("ours", "TRL"))
    assert ours["reference"] == "TRL" and ours["ratio"] > 0 and "ratio" not in trl
    # float32 sums in another order: 1e-6 relative, with three digits to spare.
    assert trl["metrics"] == pytest.approx(ours["metrics"], rel=1e-3, abs=1e-6)
    assert trl["tokens"] == ours["tokens"] > 0
    for info in (ours, trl):
        assert {"forward", "head and loss", "backward", "optimizer"} <= set(info["phases"])
        assert info["sizes"]["group"] == 2 and info["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "peer", "phases"),
    [
        ("rollout --model=toy --sizes=group=3,completion=4", "transformers", "generate sleep sync wake"),
        ("kernels --shape=32x16x300 --rows=peaked", "ours", "aten::mm,_2_launches idle"),
    ],
)
def test_a_benchmark_is_timed_phase_by_phase(run, arguments, peer, phases):
    row = run(*arguments.split(), "--dtype=float32", f"--peer={peer}")[peer]

    assert {name.replace("_", " ") for name in phases.split()} <= row["extra_info"]["phases"].keys()
    assert row["stats"]["median"] > 0 and row["extra_info"].get("tokens", 1) <= 2 * 3 * 4


def test_whole_steps_of_both_trainers_take_turns(run, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(test_train, "in_a_process", lambda _, call, *given: (call(*given), 1 << 20))
    sizes = "--sizes=prompts=2,group=2,prompt=4,completion=4,steps=2"
    rows = run("train", "--model=toy", "--dtype=float32", "--engine=transformers", sizes, "--turn=1,2")

    assert [name[-7:] for name in rows] == ["1-ours]", "-1-TRL]", "2-ours]", "-2-TRL]"]
    for info, data in ((row["extra_info"], row["stats"]["data"]) for row in rows.values()):
        assert len(data) == 2  # without the first step
        assert info["peak_bytes"] == 1 << 20 and 0 < info["tokens"] <= 2 * 2 * 4
        assert {"reward", "update"} <= info["phases"].keys() and 0 < info["phases"]["generate"] < max(data)


def test_the_largest_group_that_fits_is_found_in_few_tries(monkeypatch, seed):
    limit, sizes = random.Random(seed).randint(2, 1024), []

    def searched(limit: int, largest: int = 1024, seconds: float = 60.0) -> tuple[int, int, str]:
        sizes.clear()
        peaks = {size: 7 for size in range(limit + 1)}
        monkeypatch.setattr(test_group, "run_probe", lambda of: sizes.append(of.size) or peaks.get(of.size))
        return search(PROBE, largest, time.monotonic() + seconds)

    fits, peak, remark = searched(limit)
    assert (fits, peak, bool(remark)) == (limit, 7, limit == 1024)
    assert len(sizes) == len({*sizes}) <= 20  # ten doublings, ten halvings
    assert searched(1024, largest=24)[0] == 24 and sizes == [2, 4, 8, 16, 24]
    for given, said in (({"limit": 1}, "not even two fit"), ({"limit": 9, "seconds": 0}, "no time left")):
        with pytest.raises(Failure, match=said):
            searched(**given)

    monkeypatch.undo()
    monkeypatch.setattr(measure, "in_a_process", lambda _, call, given, **__: (call(given), 1 << 20))
    assert run_probe(replace(PROBE, size=2)) == 1 << 20
    assert run_probe(replace(PROBE, size=2, budget=1 << 19)) is None


def test_sampled_gradients_are_unbiased_and_dropped_ones_add_up(tmp_path, monkeypatch, seed):
    peaked = {"vocab_size": 4000, "initializer_range": 0.8}
    monkeypatch.setitem(ARCHITECTURES, "peaked", ("llama", ARCHITECTURES["toy"][1] | peaked))
    make_policy(TOY.model_copy(update={"path": "peaked"})).save_pretrained(tmp_path)
    prompts = [f'{{"prompt": "{a}{b}"}}\n' for a in "abcd" for b in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))

    rows = rows_of(str(tmp_path), str(tmp_path / "prompts.jsonl"), CPU, seed)
    with sampling_without_kernels():
        few, many = (test_bias.Study(test_bias.draw(*rows, tokens, seed)) for tokens in (64, 1024))
        bias = few.bias(40)

    assert 0 < few.density < 0.9 and 0.8 < bias < 1.25  # were they dropped, 40
    drawn = [study.errors("ours")["behind"] for study in (few, many)]
    assert drawn[1] < 3 * drawn[0] and many.errors("dropped")["behind"] > 3 * drawn[1]


def test_both_trainers_run_a_recipe_with_the_same_settings(run, toy, tmp_path, monkeypatch):
    pytest.importorskip("trl")

    def here(command: list[str], check: bool) -> None:
        assert command[:3] == [sys.executable, "-m", "grpo_fast"] and check
        assert cli.main(command[3:]) == 0

    monkeypatch.setattr(test_recipe, "subprocess", SimpleNamespace(run=here))
    monkeypatch.setattr(test_recipe, "in_a_process", lambda _, call, *given: (call(*given), 0))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(toy))
    given = "model.device=cpu model.dtype=float32 max_steps=2 threads=1 dataset.chat=false"
    given += " evaluation.every=1 evaluation.size=5"
    sets = [f"--set={override}" for override in given.split()]

    rows = run("recipe", f"--recipe={recipe}", "--seed=3", "--sizes=rows=12", *sets)

    ours, trl, patched = (rows[name]["extra_info"] for name in ("ours", "TRL", "our head"))
    # The same weights and questions, and the exact head of ours changes nothing of what TRL computes.
    assert ours["before"]["score"] == trl["before"]["score"]
    assert trl["after"]["score"] == patched["after"]["score"]
    for info in (ours, trl, patched):
        assert [(score["step"], score["n"]) for score in info["scores"]] == [(0, 10), (1, 5), (2, 10)]
        assert 0 < info["phases"]["generate"] < info["training"] and info["peak_bytes"] > 0
        assert info["sizes"]["arithmetic"].startswith("float32")


def test_what_trl_does_not_do_alike_is_refused(toy, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(toy | {"minibatches": 2}))

    with pytest.raises(ValueError, match=r"not given minibatches, rollout\.stop"):
        train_with_trl(str(recipe), ["rollout.stop=[x]"], 12)
    with pytest.raises(ValueError, match="--sizes rows=7 must divide the 24 completions"):
        train_with_trl(str(recipe), ["minibatches=1"], 7)


def test_phases_add_up_without_inner_ones(monkeypatch):
    clock = iter([0.0, 1, 2, 12, 14, 20, 23, 123])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)

    watch.start()
    with watch.phase("head"), watch.phase("forward"):
        pass
    watch.phase("head")(lambda: None)()

    assert watch.stop() == (123, {"head": 1 + 2 + 3, "forward": 10})


def test_a_call_has_a_process_of_its_own_and_its_failure_is_reported():
    preload("benchmarks.measure")  # all processes of the session are forked from one that has imported it
    noise, grown = in_a_process(CPU, os.urandom, 1 << 26)

    assert len(noise) == 1 << 26 and 0 < grown < 1 << 30
    for call, given, seconds, failure in (
        (int, "x", 60, "ValueError: invalid literal for int"),
        (signal.raise_signal, signal.SIGKILL, 60, "out of memory: the process died"),
        (time.sleep, 600, 0.5, r"took more than 0\.5 s"),
    ):
        with pytest.raises(Failure, match=failure):
            in_a_process(CPU, call, given, seconds=seconds)
