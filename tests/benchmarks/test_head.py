"""The head benchmark: its peers, their outcomes, and the rows that they are measured on."""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import rows, test_head
from benchmarks.measure import OOM
from benchmarks.oracle import LIMITS, consult, require_right
from benchmarks.peers import Peer, Unsupported, all_peers, functions, liger
from benchmarks.peers.functions import full_logits, logprobs
from benchmarks.problem import LOSSES, MODES, TOKEN_LOSSES, Outcome, Problem, Setting, call, loss_of
from benchmarks.rows import make_problem

CPU = torch.device("cpu")
ONE = ("--shape=48x32x300", "--rows=peaked", "--dtype=float32")
FULL = Peer("torch full logits", full_logits)
LIBRARIES = ("cut_cross_entropy", "flash_attn", "liger_kernel", "quack", "trl", "unsloth_zoo", "verl")
INTERPRETED = {"Liger GRPO on full logits", "Liger fused linear cross-entropy"}


def use_only(monkeypatch: pytest.MonkeyPatch, *peers: Peer) -> None:
    monkeypatch.setitem(test_head.AXES, "peer", [peer.name for peer in peers])
    monkeypatch.setattr("benchmarks.peers.all_peers", lambda: [*peers])


def remarks(rows: dict[str, dict]) -> dict[str, str]:
    return {name: row["extra_info"].get("remark", "") for name, row in rows.items()}


def damaged(name: str, damage: Callable[[Tensor], Tensor], *, loss_alone: bool = False) -> Peer:
    """Make a peer whose log-probabilities are damaged, or only its loss."""

    def run(problem: Problem) -> Outcome:
        found = logprobs(problem.hidden, problem.weight, problem.targets)
        if loss_alone:
            return problem.finish_loss(damage(loss_of(problem, found)))
        return problem.finish(damage(found))

    return Peer(name, lambda problem: partial(run, problem))


def test_every_setting_has_a_row_with_its_ratio_memory_and_errors(run, capsys):
    settings = ("--mode=forward_backward,forward", "--weight=trainable,frozen")
    rows = run("head", *ONE, "--peer=ours,torch full", *settings)
    name = "48x32x300-peaked-logprob-forward_backward-trainable"

    assert len(rows) == 4 * 4
    kept, row = (rows[f"{name}-float32-{of}]"] for of in ("ours, tolerance 0, kept", "ours"))
    info = row["extra_info"]
    assert kept["extra_info"]["remark"] == "needs a CUDA device"
    assert len(row["stats"]["data"]) >= 3 and info["reference"] == "X Wᵀ"
    assert 0 < info["quartiles"][0] <= info["ratio"] <= info["quartiles"][1]
    assert info["metrics"]["density"] == 1.0
    assert info["peak_bytes"] >= 4 * (48 * 32 + 300 * 32)  # its gradients
    printed = capsys.readouterr().out
    assert "shape 48x32x300, rows peaked, loss logprob, dtype float32" in printed and "X Wᵀ" in printed


def test_a_peer_that_fails_or_gives_too_little_says_how_and_keeps_no_memory(run, monkeypatch):
    held: list[weakref.ref] = []

    def greedy(problem: Problem) -> Callable[[], None]:
        kept = torch.empty(1000)
        held.append(weakref.ref(kept))

        def run() -> None:
            raise torch.OutOfMemoryError(f"on top of {kept.nbytes}")

        return run

    def check(problem: Problem) -> None:
        assert held and not any(reference() is not None for reference in held)
        raise ImportError("checked")

    use_only(
        monkeypatch,
        Peer("greedy", greedy),
        Peer("next", check),
        Peer("short", lambda problem: lambda: Outcome(torch.zeros(len(problem.targets) - 1))),
        Peer("lazy", lambda problem: Outcome),
        FULL,
    )
    found = remarks(run("head", *ONE, codes=(1,)))

    assert (found["greedy"], found["next"]) == (OOM, "not installed: checked")
    assert "ValueError: logprob of shape" in found["short"] and "hidden.grad" in found["lazy"]


def test_a_wrong_result_of_any_loss_is_refused_and_not_timed(run, monkeypatch):
    use_only(
        monkeypatch,
        damaged("logprobs", lambda found: 1.3 * found),
        damaged("NaN", lambda found: torch.nan * found),
        damaged("above 0", lambda found: found - found.detach() + 1),
        damaged("ours", lambda found: 1.01 * found),
        damaged("loss", lambda loss: loss + 1, loss_alone=True),
        damaged("gradient", lambda loss: loss.detach() + 1.5 * (loss - loss.detach()), loss_alone=True),
        FULL,
    )
    rows = run("head", "--shape=48x32x300", "--rows=flat", f"--loss={','.join(TOKEN_LOSSES)}", codes=(1,))

    assert len(rows) == 7 * len(TOKEN_LOSSES)
    for row in rows.values():
        right = row["params"]["peer"] == FULL.name
        remark = row["extra_info"].get("remark", "")
        assert ("stats" in row) == right, row
        assert right or (remark.startswith("failed: Wrong: ") and " off by " in remark)


PLUGGED = [Peer("plugged in", full_logits), SimpleNamespace(name="no Peer", prepare=full_logits)]
NOT_ONE = ["a string"]


def test_packages_add_peers_and_a_broken_or_missing_one_says_why(run, monkeypatch):
    """Listing the peers imports no library of theirs either."""
    for name in [*LIBRARIES, *sys.modules]:
        if name.partition(".")[0] in LIBRARIES:
            monkeypatch.setitem(sys.modules, name, None)
    for module in (functions, liger):
        importlib.reload(module)
    group, offered = "grpo_fast.benchmark_peers", {"good": "PLUGGED", "bad": "NOT_THERE", "worse": "NOT_ONE"}
    plugins = {group: [EntryPoint(name, f"{__name__}:{of}", group) for name, of in offered.items()]}
    monkeypatch.setattr("benchmarks.peers.entry_points", lambda group: plugins[group])
    monkeypatch.setitem(test_head.AXES, "peer", [peer.name for peer in all_peers()])
    found = remarks(run("head", *ONE, codes=(1,)))

    assert found["plugged in"] == found["no Peer"] == found["ours"] == ""
    assert "no `prepare(problem)`" in found["worse"] and "NOT_THERE" in found["bad"]
    for name in ("TRL fused head", "Liger per-token"):
        assert found[name].startswith("not installed")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_peer_that_runs_here_has_the_loss_and_its_gradient(loss, mode, device, seed, monkeypatch):
    sizes, dtype = ((32, 24, 100), "float32") if device == "cpu" else ((512, 256, 4096), "bfloat16")
    problem = make_problem(Setting("peaked", *sizes, mode, True, dtype, loss), torch.device(device), seed)
    oracle, found, peers = consult(problem), {}, all_peers()
    # float32 beside float64, of values and relative gradients of the order of one
    limits = dict.fromkeys(LIMITS, 1e-4) if device == "cpu" else LIMITS

    for peer in peers:
        with monkeypatch.context() as patch, suppress(ImportError, Unsupported):
            if device == "cpu" and peer.name in INTERPRETED and os.environ["TRITON_INTERPRET"] == "1":
                for module in ("benchmarks.peers", "benchmarks.peers.liger"):
                    patch.setattr(f"{module}.require_cuda", lambda problem: None)
            run = peer.prepare(problem)
            found[peer.name] = oracle.judge(problem, call(run, problem))
            require_right(found[peer.name], limits)

    assert {"ours", "ours, tolerance 0", "torch full logits"} <= found.keys()
    assert len({peer.name for peer in peers}) == len(peers)  # so that records can be compared


def test_made_rows_thin_out_with_the_threshold_as_a_models_rows_do(seed, monkeypatch):
    """In Qwen2.5-Coder-1.5B both ratios of tiles are 3.3, and a tile above 1e-5 holds 1.7 entries above.

    Independent normal logits of the spread that `peaked` has give 8, 9 and 1.05.
    """
    monkeypatch.setattr(rows, "live_tiles", lambda: (torch.tensor([18 / 500]), torch.tensor([1.0])))

    problem = make_problem(Setting("histogram", 64, 256, 64_000, "forward", True, "float32"), CPU, seed)

    p = (problem.hidden @ problem.weight.T).softmax(1).view(64, 500, 128)
    tiles = {threshold: float((p.amax(2) > threshold).float().mean()) for threshold in (1e-4, 1e-5, 1e-6)}
    entries = float((p > 1e-5).sum() / (p.amax(2) > 1e-5).sum())
    surprise = -p.flatten(1).gather(1, problem.targets[:, None]).log().mean()
    entropy = torch.special.entr(p).sum((1, 2)).mean()
    assert 0.1 < entropy < 2.5 and abs(surprise - entropy) < 0.7  # targets are sampled from the rows
    assert tiles[1e-5] == pytest.approx(18 / 500, rel=0.05)
    assert 2.2 < tiles[1e-6] / tiles[1e-5] < 5
    assert 2.2 < tiles[1e-5] / tiles[1e-4] < 6
    assert 1.3 < entries < 2.3
