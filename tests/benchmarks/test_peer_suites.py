"""The peers' tests on our functions: what is copied and changed, what runs, and how it is reported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import peer_suites
from benchmarks.peer_projects import SUITES
from benchmarks.peer_suites import outcome, prepare, run_suite

TEST = """
from trl.kernels import ChunkedLogProbFunction
from .testing_utils import require_torch_accelerator


@require_torch_accelerator
class TestChunkedLogProbFunction:
    def test_forward(self):
        assert False, "counts chunks"

    def test_name(self):
        assert ChunkedLogProbFunction.__name__ == "FusedHead"

    def test_backward_bfloat16(self):
        assert 0.5 < 0.1

    def test_other(self):
        raise ValueError("seven")
"""


@pytest.fixture
def trl_source(tmp_path: Path) -> Path:
    source = tmp_path / "trl"
    (source / "tests").mkdir(parents=True)
    (source / "tests" / "test_kernels.py").write_text(TEST)
    (source / "COMMIT").write_text("c0ffee\n")
    return source


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="pip install --no-deps trl")
def test_a_suite_runs_on_our_functions_and_every_failure_has_a_kind(trl_source):
    found = run_suite("trl", trl_source, seconds=600)

    assert {key: found[key] for key in ("commit", "finished", "passed", "failed", "deselected")} == {
        "commit": "c0ffee",
        "finished": True,
        "passed": 1,
        "failed": 2,
        "deselected": 1,
    }
    kinds = {failure["test"].rpartition("::")[2]: failure["kind"] for failure in found["failures"]}
    assert kinds["test_backward_bfloat16"] == next(iter(SUITES["trl"].failures.values()))
    assert kinds["test_other"] == peer_suites.UNKNOWN
    assert "ValueError: seven" in json.dumps(found["failures"])


def test_the_names_are_taken_in_the_test_file_itself(trl_source, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    prepare("trl", trl_source, scratch)

    text = (scratch / "tests" / "test_kernels.py").read_text()
    assert text.startswith("from benchmarks.peer_projects import trl as _alias")
    assert (scratch / "tests" / "testing_utils.py").exists()
    assert (trl_source / "tests" / "test_kernels.py").read_text() == TEST


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests stay as they are where there is a GPU")
def test_without_a_gpu_the_copies_compute_on_the_cpu(tmp_path):
    source, scratch = tmp_path / "cce", tmp_path / "scratch"
    (source / "tests").mkdir(parents=True)
    (source / "cut_cross_entropy").mkdir()
    scratch.mkdir()
    for name in ("test_cce_loss_forward", "test_cce_loss_backward", "test_vocab_parallel"):
        (source / "tests" / f"{name}.py").write_text('e = torch.randn(3, device="cuda")\n')

    prepare("cce", source, scratch)

    assert 'e = torch.randn(3, device="cpu")' in (scratch / "test_cce_loss_forward.py").read_text()


def test_a_folder_that_is_no_checkout_is_refused_with_the_address(tmp_path):
    with pytest.raises(ValueError, match=r"has no tests/test_kernels\.py: give a checkout of https://github"):
        prepare("trl", tmp_path, tmp_path)


def test_what_was_not_reached_is_neither_passed_nor_failed():
    results = [
        {"selected": 5},
        {"test": "a", "outcome": "passed", "message": ""},
        {"test": "b", "outcome": "deselected", "message": "a GPU only"},
        {"test": "c", "outcome": "skipped", "message": "why"},
    ]

    found = outcome(SUITES["cce"], results)

    assert (found["passed"], found["failed"], found["skipped"], found["selected"]) == (1, 0, 1, 5)
    assert found["reasons"] == {"deselected": {"a GPU only": 1}, "skipped": {"why": 1}}


def test_a_suite_without_a_folder_is_named_and_nothing_run_is_a_failure(tmp_path, capsys):
    assert peer_suites.main(["--source", str(tmp_path), "--suite", "verl"]) == 1
    assert "verl: no folder" in capsys.readouterr().out
