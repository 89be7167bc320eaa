"""The head benchmark: what becomes of each implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import test_accuracy, test_head
from benchmarks.peers import Peer, ours
from benchmarks.peers.functions import full_logits, logprobs
from benchmarks.problem import LOSSES, Outcome, Problem, Run, loss_of

ONE = ("--shape=48x32x300", "--rows=peaked", "--dtype=float32")
FULL = Peer("torch full logits", full_logits)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the implementations."""

    def replaced(*found: Peer) -> None:
        for module in (test_head, test_accuracy):
            monkeypatch.setitem(module.AXES, "peer", [peer.name for peer in found])
        monkeypatch.setattr("benchmarks.peers.all_peers", lambda: list(found))
        monkeypatch.setattr(ours, "PEERS", found)

    return replaced


def raising(name: str, error: BaseException) -> Peer:
    def prepare(_: Problem) -> Run:
        raise error

    return Peer(name, prepare)


def damaged(damage: Callable[[Tensor], Tensor], name: str = "wrong", *, loss_alone: bool = False) -> Peer:
    """Whose log-probabilities are damaged, or its loss, which keeps its log-probabilities."""

    def prepare(problem: Problem) -> Run:
        def found() -> Tensor:
            return logprobs(problem.hidden, problem.weight, problem.targets)

        if loss_alone:
            return lambda: problem.finish_loss(damage(loss_of(problem, found())))
        return lambda: problem.finish(damage(found()))

    return Peer(name, prepare)


def test_every_setting_has_a_row_with_its_ratio_memory_and_errors(run, capsys):
    settings = ("--rows=flat,peaked", "--mode=forward_backward,forward", "--weight=trainable,frozen")
    rows = run("head", "--shape=48x32x300", "--dtype=float32", "--peer=ours,torch full", *settings)

    assert len(rows) == 8 * 4
    told = {row["extra_info"].get("remark") for name, row in rows.items() if "kept" in name}
    assert told == {"needs a CUDA device"}
    row = rows["48x32x300-peaked-logprob-forward_backward-trainable-float32-ours]"]
    info = row["extra_info"]
    assert len(row["stats"]["data"]) >= 3 and info["reference"] == "X Wᵀ"
    assert 0 < info["quartiles"][0] <= info["ratio"] <= info["quartiles"][1]
    assert max(info["accuracy"].values()) < 1e-4 and info["metrics"]["density"] == 1.0
    assert info["peak_bytes"] >= 4 * (48 * 32 + 300 * 32)  # its gradients
    printed = capsys.readouterr().out
    assert "shape 48x32x300, loss logprob, dtype float32" in printed and "X Wᵀ" in printed


def test_a_peer_that_fails_or_gives_too_little_says_how(run, only, capsys):
    only(
        raising("absent", ImportError("No module named 'absent'")),
        Peer("greedy", lambda problem: lambda: problem.finish(torch.empty(1 << 55))),
        Peer("short", lambda problem: lambda: Outcome(torch.zeros(len(problem.targets) - 1))),
        Peer("lazy", lambda problem: Outcome),
        FULL,
    )
    rows = run("head", *ONE, codes=(1,))

    told = {name: row["extra_info"].get("remark", "") for name, row in rows.items()}
    assert told.pop("absent") == "not installed: No module named 'absent'"
    assert told.pop("greedy") == "out of memory"
    assert told.pop("short").startswith("failed: ValueError: log-probabilities of shape")
    assert "hidden.grad" in told.pop("lazy")
    assert told == {"torch full logits": ""} and rows["torch full logits"]["stats"]["median"] > 0
    assert "not installed: No module named 'absent'" in capsys.readouterr().out


def test_a_wrong_result_of_any_loss_is_refused_and_not_timed(run, only):
    only(
        damaged(lambda found: 1.3 * found, "logprobs"),
        damaged(lambda found: torch.nan * found, "NaN"),
        damaged(lambda found: found - found.detach() + 1, "above 0"),
        damaged(lambda loss: loss + 1, "loss", loss_alone=True),
        damaged(lambda loss: loss.detach() + 1.5 * (loss - loss.detach()), "gradient", loss_alone=True),
        FULL,
    )
    rows = run("head", "--shape=48x32x300", "--rows=flat", f"--loss={','.join(LOSSES)}", codes=(1,))

    assert len(rows) == 6 * len(LOSSES)
    for row in rows.values():
        right = row["params"]["peer"] == FULL.name
        remark = row["extra_info"].get("remark", "")
        assert ("stats" in row) == right, row
        assert right or (remark.startswith("failed: Wrong: ") and " off by " in remark)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (damaged(lambda found: found * (1 + 1e-2)), "hidden gradient off by 1.0e-02"),
        (damaged(lambda found: found * torch.nan), "logprob off by nan"),
        (raising("broken", ZeroDivisionError("why")), "ZeroDivisionError: why"),
        (FULL, "8 passed"),
    ],
)
def test_accuracy_fails_on_a_wrong_result(run, only, capsys, peer, said):
    only(peer)
    run("accuracy", "--dtype=float32", codes=(int(peer is not FULL),))

    assert said in capsys.readouterr().out
