"""A wrong head must not pass."""

from __future__ import annotations

import pytest
import torch

from benchmarks import smoke
from benchmarks.__main__ import main
from benchmarks.peers import Peer
from benchmarks.peers.torch_full import logprobs
from benchmarks.problem import Problem, Run
from benchmarks.record import read


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Replaces the implementations by one, and the sizes by one small batch."""
    monkeypatch.setitem(smoke._SIZES, "cpu", (("peaked", 16, 24, 300),))

    def replace(prepare) -> None:
        monkeypatch.setattr(smoke, "PEERS", (Peer("one", prepare),))

    return replace


def of(damage):
    """An implementation whose log-probabilities are damaged."""

    def prepare(problem: Problem) -> Run:
        return lambda: problem.finish(damage(logprobs(problem.hidden, problem.weight, problem.targets)))

    return prepare


def run(tmp_path) -> tuple[int, list]:
    out = tmp_path / "out.json"
    code = main(["smoke", "--device", "cpu", "--json", str(out)])
    return code, read(out).cells


def test_every_loss_and_head_is_tried_and_found_right(only, tmp_path, capsys):
    only(of(lambda found: found))

    code, cells = run(tmp_path)

    assert code == 0
    assert [(c.shape["loss"], c.shape["trainable"]) for c in cells] == [
        ("logprob", True), ("logprob", False), ("grpo", True), ("cross_entropy", True)
    ]  # fmt: skip
    assert all(cell.metrics["first_call_seconds"] > 0 for cell in cells)
    assert "smoke: right; 4 of 4 trials right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda found: found * (1 + 1e-2), "hidden gradient off by"),
        (lambda found: found * torch.nan, "a log-probability not finite"),
        (lambda found: found - found.detach() + 1e-3, "a log-probability above 0"),
    ],
)
def test_a_wrong_one_is_named_and_fails(only, tmp_path, capsys, damage, said):
    only(of(damage))

    code, cells = run(tmp_path)

    assert code == 1
    assert {cell.status for cell in cells} == {"failed"}
    printed = capsys.readouterr().out
    assert said in cells[0].reason
    assert "smoke: WRONG" in printed and "one at peaked rows" in printed


def test_without_time_nothing_is_called_right(only, capsys):
    only(of(lambda found: found))

    assert main(["smoke", "--device", "cpu", "--minutes", "0"]) == 1
    assert "smoke: nothing was tried; 0 of 4 trials right" in capsys.readouterr().out


def test_one_that_raises_or_has_no_memory_leaves_the_rest_to_be_tried(only, tmp_path):
    def broken(problem: Problem) -> Run:
        raise torch.OutOfMemoryError("CUDA out of memory")

    only(broken)

    code, cells = run(tmp_path)

    assert (code, [cell.status for cell in cells]) == (1, ["oom"] * 4)
