"""The head benchmark on a CPU, in miniature: what becomes of each implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import accuracy, head
from benchmarks.measure import FAILED, OK, OOM, SKIPPED
from benchmarks.peers import Peer
from benchmarks.peers.functions import full_logits, logprobs
from benchmarks.problem import LOGPROB, LOSSES, PRODUCT, Outcome, Problem, Run, loss_of
from tests.benchmarks.conftest import by_name

TINY = ("--hidden", "32", "--vocab", "300", "--tokens", "48")
ONE = ["--rows", "peaked", "--mode", "forward_backward", "--trainable", "--loss", "logprob"]
FULL = Peer("torch full logits", full_logits)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the implementations, and the sizes of `accuracy` by one small batch."""
    monkeypatch.setitem(accuracy.SIZES, "cpu", (("peaked", 16, 24, 300),))

    def replaced(*found: Peer) -> None:
        monkeypatch.setattr(head, "all_peers", lambda: list(found))
        monkeypatch.setattr(accuracy, "PEERS", found)

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


def test_a_run_prints_a_table_and_writes_a_record_of_every_setting(run, capsys):
    record = run("head", *TINY, "--rows", "flat", "peaked", "--impl", "ours", "torch full", "--loss", LOGPROB)

    assert len({repr(cell.shape) for cell in record.cells}) == 6  # rows: forward, and backward of either head
    skipped = {cell.implementation for cell in record.cells if cell.status != OK}
    assert skipped == {"ours, tolerance 0, kept"}  # needs a GPU
    trained = next(cell for cell in record.cells if cell.implementation == "ours")
    assert len(trained.seconds) == 3 and trained.quartiles[0] <= trained.median <= trained.quartiles[1]
    assert max(trained.accuracy[name] for name in ("logprob", "weight_gradient")) < 1e-4
    assert trained.metrics["density"] == 1.0
    assert trained.peak_bytes >= 4 * (48 * 32 + 300 * 32)  # its gradients
    assert (record.kind, record.environment["versions"]["torch"]) == ("head", torch.__version__)
    printed = capsys.readouterr().out
    assert (
        "ours, tolerance 0" in printed and PRODUCT in printed and "skipped ours, tolerance 0, kept" in printed
    )


def test_a_peer_that_fails_or_gives_too_little_says_how(run, only, capsys):
    only(
        raising("absent", ImportError("No module named 'absent'")),
        Peer("greedy", lambda problem: lambda: problem.finish(torch.empty(1 << 55))),
        Peer("short", lambda problem: lambda: Outcome(torch.zeros(len(problem.targets) - 1))),
        Peer("lazy", lambda problem: Outcome),
        FULL,
    )
    found = by_name(run("head", *TINY, *ONE))

    assert {name: one.status for name, one in found.items() if name != PRODUCT} == {
        "absent": SKIPPED, "greedy": OOM, "short": FAILED, "lazy": FAILED, "torch full logits": OK
    }  # fmt: skip
    assert "log-probabilities of shape" in found["short"].reason
    assert "hidden.grad" in found["lazy"].reason
    printed = capsys.readouterr().out
    assert found["short"].reason[:20] in printed and "skipped absent: not installed" in printed


def test_a_wrong_result_of_any_loss_is_refused_and_not_timed(run, only):
    only(
        damaged(lambda found: 1.3 * found, "logprobs"),
        damaged(lambda found: torch.nan * found, "NaN"),
        damaged(lambda found: found - found.detach() + 1, "above 0"),
        damaged(lambda loss: loss + 1, "loss", loss_alone=True),
        damaged(lambda loss: loss.detach() + 1.5 * (loss - loss.detach()), "gradient", loss_alone=True),
        FULL,
    )
    record = run("head", *TINY, "--rows", "flat", "--mode", "forward_backward", "--trainable")

    assert [cell.shape["loss"] for cell in record.cells if cell.implementation == "NaN"] == [*LOSSES]
    for cell in record.cells:
        right = cell.implementation in (FULL.name, PRODUCT)
        assert (cell.status == OK) == bool(cell.seconds) == right, cell
        assert right or (cell.reason.startswith("Wrong: ") and " off by " in cell.reason)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (damaged(lambda found: found * (1 + 1e-2)), "hidden gradient off by 1.0e-02"),
        (damaged(lambda found: found * torch.nan), "logprob off by nan"),
        (raising("greedy", torch.OutOfMemoryError("CUDA out of memory")), ""),
        (raising("absent", ImportError("nothing to try")), "not installed"),
    ],
)
def test_accuracy_fails_on_a_wrong_result_and_where_nothing_was_right(run, only, peer, said):
    only(peer)

    record = run("accuracy", code=1)

    losses = [("logprob", True), ("logprob", False), ("grpo", True), ("cross_entropy", True)]
    assert [(cell.shape["loss"], cell.shape["trainable"]) for cell in record.cells] == losses
    assert all(said in cell.reason for cell in record.cells[:2])
    only(FULL)
    assert {cell.status for cell in run("accuracy").cells} == {OK}
