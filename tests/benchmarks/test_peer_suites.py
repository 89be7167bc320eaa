"""The peers' tests on our functions: what is copied and changed, what runs, and how it is reported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import peer_suites
from benchmarks.peer_suites import SUITES, prepare

TEST = """
import pytest
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss


def test_triton_grpo():
    assert False, "Liger's own kernel"

def test_name():
    assert LigerFusedLinearGRPOLoss.__module__.startswith("grpo_fast")

@pytest.mark.parametrize("case", ["luspo-dtype0-4096"])
def test_correctness(case):
    assert 0.5 < 0.1

def test_other():
    raise ValueError("seven")

@pytest.mark.skip(reason="why")
def test_skipped():
    pass
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="fewer tests are left out where there is a GPU")
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="pip install liger-kernel")
def test_a_suite_runs_on_our_functions_and_every_failure_has_a_kind(tmp_path, capsys):
    record = tmp_path / "record.json"
    source = tmp_path / "liger"
    for number, file in enumerate(SUITES["liger"].tests):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text("" if number else TEST)
    (source / "COMMIT").write_text("c0ffee\n")

    arguments = ["--source", str(tmp_path), "--suite", "liger", "verl", "--json", str(record)]
    assert peer_suites.main(arguments) == 1  # one failure is unexplained

    printed, found = capsys.readouterr().out, json.loads(record.read_text())["suites"]["liger"]
    assert "liger: 1 passed, 2 failed, 1 deselected, 1 skipped" in printed
    assert "verl: no folder" in printed
    assert found["commit"] == "c0ffee"
    assert found["reasons"]["deselected"] == {"Liger's own Triton kernel on a GPU": 1}
    assert found["reasons"]["skipped"] == {"why": 1}
    kinds = {failure["test"].rpartition("::")[2]: failure["kind"] for failure in found["failures"]}
    assert kinds == {
        "test_correctness[luspo-dtype0-4096]": next(iter(SUITES["liger"].failures.values())),
        "test_other": peer_suites.UNKNOWN,
    }
    assert "ValueError: seven" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests stay as they are where there is a GPU")
def test_copies_take_our_names_and_compute_on_the_cpu(tmp_path):
    source, scratch, test = tmp_path / "cce", tmp_path / "scratch", Path("tests", "test_vocab_parallel.py")
    (source / "tests").mkdir(parents=True)
    (source / "cut_cross_entropy").mkdir()
    (source / test).write_text('e = torch.randn(3, device="cuda")\n')

    prepare("cce", source, scratch)

    text = (scratch / test).read_text()
    assert text.startswith("from benchmarks.peer_aliases import cce as _alias")
    assert text.endswith('e = torch.randn(3, device="cpu")\n')
    assert (source / test).read_text() == 'e = torch.randn(3, device="cuda")\n'


def test_a_folder_that_is_no_checkout_is_refused_with_the_address(tmp_path):
    with pytest.raises(ValueError, match=r"has no tests/test_kernels\.py: give a checkout of https://github"):
        prepare("trl", tmp_path, tmp_path)
