"""The peers: nothing of theirs is imported before it is asked for, and anybody can add one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import test_head
from benchmarks.oracle import consult, require_right
from benchmarks.peers import Peer, Unsupported, all_peers, functions, liger, peer_named
from benchmarks.problem import LOSSES, MODES, Problem, Run, Setting, call
from benchmarks.rows import make_problem

CPU = torch.device("cpu")
LIBRARIES = ("cut_cross_entropy", "flash_attn", "liger_kernel", "quack", "trl", "unsloth_zoo", "verl")
SETTING = Setting("flat", 32, 24, 100, "forward_backward", True, "float32")
SMALL = ("--shape=32x24x100", "--rows=peaked", "--dtype=float32")


def test_without_any_peer_installed_ours_is_measured_and_the_others_say_why(run, monkeypatch):
    """So that listing them imports no library of theirs either."""
    for name in [*LIBRARIES, *sys.modules]:
        if name.partition(".")[0] in LIBRARIES:
            monkeypatch.setitem(sys.modules, name, None)
    for module in (functions, liger):
        importlib.reload(module)

    rows = run("head", *SMALL)

    assert "stats" in rows["ours"]
    for name in ("TRL fused head", "Liger per-token"):
        assert rows[name]["extra_info"]["remark"].startswith("not installed")


def right(problem: Problem) -> Run:
    return lambda: problem.finish(functions.logprobs(problem.hidden, problem.weight, problem.targets))


class Plain:
    name = "plugged in, a class"
    prepare = staticmethod(right)


PLUGGED, NOT_ONE = [Peer("plugged in", right), Plain], ["a string"]


def test_an_installed_distribution_adds_peers_and_its_mistakes_show(run, monkeypatch):
    offered = {"good": "PLUGGED", "broken": "NOT_THERE", "broken too": "NOT_ONE"}

    def entry_points(group: str) -> list[EntryPoint]:
        assert group == "grpo_fast.benchmark_peers"
        return [EntryPoint(name, f"{__name__}:{of}", group) for name, of in offered.items()]

    monkeypatch.setattr("benchmarks.peers.entry_points", entry_points)
    monkeypatch.setitem(test_head.AXES, "peer", [peer.name for peer in all_peers()])
    rows = run("head", *SMALL, "--peer=plugged in,broken", codes=(1,))

    assert rows["plugged in"]["extra_info"]["accuracy"]["logprob"] < 1e-4
    assert "stats" in rows["plugged in, a class"]
    assert "no `prepare(problem)`" in rows["broken too"]["extra_info"]["remark"]
    assert "NOT_THERE" in rows["broken"]["extra_info"]["remark"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_peer_that_runs_here_has_the_loss_and_its_gradient(loss, mode, seed):
    problem = make_problem(replace(SETTING, mode=mode, loss=loss), CPU, seed)
    oracle, ran, peers = consult(problem), set(), all_peers()

    for peer in peers:
        try:
            run = peer.prepare(problem)
        except (ImportError, Unsupported):
            continue
        errors = oracle.judge(problem, call(run, problem))
        ran.add(peer.name)
        # float32 beside float64, of values and relative gradients of the order of one
        assert all(error < 1e-4 for error in errors.values()), (peer.name, errors)

    assert {"ours", "ours, tolerance 0", "torch full logits"} <= ran
    assert len({peer.name for peer in peers}) == len(peers)  # so that records can be compared


def test_verls_kernels_are_found_without_ray():
    pytest.importorskip("triton")
    if find_spec("verl") is None or find_spec("ray"):
        pytest.skip("verl is not installed, or Ray is")
    code = "from benchmarks.peers.functions import verl; verl(); import verl.utils.kernel.kernels"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.gpu
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("peer", all_peers(), ids=lambda peer: peer.name)
def test_a_peer_on_the_gpu_is_right_or_says_why_it_is_not_there(peer, loss):
    setting = Setting("peaked", 512, 256, 4096, "forward_backward", True, "bfloat16", loss)
    problem = make_problem(setting, torch.device("cuda"), seed=0)
    try:
        run = peer.prepare(problem)
    except (ImportError, Unsupported) as reason:
        pytest.skip(str(reason))

    require_right(consult(problem).judge(problem, call(run, problem)))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("Liger GRPO on full logits", "logprob"),
        ("Liger GRPO on full logits", "grpo"),
        ("Liger fused linear cross-entropy", "cross_entropy"),
    ],
)
def test_ligers_triton_losses_have_the_gradient_of_the_problem(monkeypatch, name, loss, seed):
    """By Triton's interpreter."""
    pytest.importorskip("liger_kernel", reason="install liger-kernel")
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("a GPU runs the kernel itself, above")
    for module in ("benchmarks.peers", "benchmarks.peers.liger"):
        monkeypatch.setattr(f"{module}.require_cuda", lambda problem: None)
    problem = make_problem(replace(SETTING, rows="peaked", loss=loss), CPU, seed)

    errors = consult(problem).judge(problem, peer_named(name).prepare(problem)())

    # on-policy its loss differs from the problem's
    assert set(errors) == {"hidden_gradient", "weight_gradient"} | ({"loss"} if loss != "logprob" else set())
    assert max(errors.values()) < 1e-4
