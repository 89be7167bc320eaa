"""The peers' own tests, run against our functions: `python -m benchmarks.peer_suites --source DIR`.

DIR holds one folder for each suite, a checkout of that project: trl, liger, cce, verl, prime_rl; those that
are missing are left out. Tests are copied to a scratch folder, our functions take the peers' names there
(`benchmarks.peer_aliases`), and pytest runs in a process of its own. Without a GPU the copies compute on the
CPU. Printed for each suite: passed, failed, deselected, skipped, and every failure's kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment

ROOT = Path(__file__).parents[1]
UNKNOWN = "unexplained"

VERL_DRIVER = """
import pytest
import torch
from linear_cross_entropy_case import TestLinearCrossEntropy as Case

Case.__test__ = False


class _Event:
    def __init__(self, **_): pass
    def record(self): pass
    def elapsed_time(self, _): return 0.0


@pytest.mark.parametrize("index", range(5))
def test_forward_and_backward(index, monkeypatch):
    case = Case(index)
    if not torch.cuda.is_available():
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        full = case.generate_hyper

        def reduced():
            full()
            case.num_tokens, case.vocab_size = case.num_tokens // 16, case.vocab_size // 16

        case.generate_hyper = reduced
    case.verify_correctness(iterations=2)
"""


@dataclass(frozen=True)
class Suite:
    """A project's tests of what we replace."""

    url: str
    distribution: str  # the installed package whose version is recorded
    copied: dict[str, str]  # from the checkout into the scratch folder
    tests: tuple[str, ...]  # pytest's arguments, in the scratch folder
    written: dict[str, str] = field(default_factory=dict)  # files of the scratch folder, and their text
    import_path: tuple[str, ...] = (".",)  # in the scratch folder
    on_cpu: tuple[tuple[str, str], ...] = ()  # replaced in the tests where there is no GPU
    deselect: dict[str, str] = field(default_factory=dict)  # pattern of a test's name: why
    gpu_only: dict[str, str] = field(default_factory=dict)  # the same, where there is no GPU
    large: dict[str, str] = field(default_factory=dict)  # the same, unless --large
    failures: dict[str, str] = field(default_factory=dict)  # pattern of name and message: kind


TO_CPU = (
    ('device="cuda"', 'device="cpu"'),
    ("skipif(not torch.cuda.is_available()", "skipif(False"),
    ("torch.bfloat16 and not torch.cuda.is_available()", "False"),
    ("torch.cuda.manual_seed", "torch.manual_seed"),
)
SUITES = {
    "trl": Suite(
        url="https://github.com/huggingface/trl",
        distribution="trl",
        copied={"tests/test_kernels.py": "tests/test_kernels.py"},
        tests=("tests/test_kernels.py",),
        written={
            "tests/__init__.py": "",
            "tests/testing_utils.py": "def require_torch_accelerator(test):\n    return test\n",
        },
        deselect={
            "TestLogProbEntropy": "tests a kernel on logits, which has no counterpart of ours",
            "TestChunkedLogProbFunction::test_forward": "patches torch.mm and counts TRL's own chunks",
        },
        failures={
            r"bfloat16|test_bias\[dtype1\]": "logits are float32, where the test rounds them to bfloat16",
            "test_is_top1_matches_argmax_with_ties": "of two equal rows of the head each is the argmax",
        },
    ),
    "liger": Suite(
        url="https://github.com/linkedin/Liger-Kernel",
        distribution="liger-kernel",
        copied={
            "test/__init__.py": "test/__init__.py",
            "test/conftest.py": "test/conftest.py",
            "test/utils.py": "test/utils.py",
            "test/chunked_loss": "test/chunked_loss",
        },
        tests=tuple(
            f"test/chunked_loss/test_{kind}_loss.py"
            for kind in ("grpo", "dpo", "orpo", "simpo", "cpo", "kto")
        ),
        gpu_only={"triton_(grpo|loss)|triton.*grpo": "Liger's own Triton kernel on a GPU"},
        large={"8-128-1024-4096": "large shape, some ten seconds a test on a CPU: --large"},
        failures={
            "luspo.*dtype0.*4096": "the reference rounds logits to bfloat16, and luspo multiplies by lengths"
        },
    ),
    "cce": Suite(
        url="https://github.com/apple/ml-cross-entropy",
        distribution="cut-cross-entropy",
        copied={
            "cut_cross_entropy": "cut_cross_entropy",
            "tests/test_cce_loss_forward.py": "test_cce_loss_forward.py",
            "tests/test_cce_loss_backward.py": "test_cce_loss_backward.py",
            "tests/test_vocab_parallel.py": "test_vocab_parallel.py",
        },
        tests=("test_vocab_parallel.py", "test_cce_loss_forward.py", "test_cce_loss_backward.py"),
        on_cpu=TO_CPU,
        deselect={
            "torch_compile": "CCE's own torch.compile implementation",
            "test_partition_n_into_range": "CCE's own arithmetic of ranges",
        },
        gpu_only={r"test_loss_backward.*cce_exact": "on a CPU the same function of ours as for 'cce'"},
    ),
    "verl": Suite(
        url="https://github.com/volcengine/verl",
        distribution="verl",
        copied={"tests/utils/test_linear_cross_entropy.py": "linear_cross_entropy_case.py"},
        tests=("test_linear_cross_entropy.py",),
        written={"test_linear_cross_entropy.py": VERL_DRIVER},
        # verl's own baseline takes labels (1, N) through flash-attention only.
        on_cpu=(*TO_CPU, ("labels=labels, inplace", "labels=labels.squeeze(0), inplace")),
    ),
    "prime_rl": Suite(
        url="https://github.com/PrimeIntellect-ai/prime-rl",
        distribution="prime-rl",
        copied={
            "pyproject.toml": "pyproject.toml",
            "src/prime_rl": "src/prime_rl",
            "packages/prime-rl-configs/src": "configs",
            "tests/unit/train/rl/test_fused_lm_head.py": "test_fused_lm_head.py",
        },
        tests=("test_fused_lm_head.py",),
        import_path=("src", "configs"),
        on_cpu=(('"cuda"', '"cpu"'),),
    ),
}


def prepare(name: str, source: Path, scratch: Path) -> None:
    """Copies a suite's files, adapted, to `scratch`.

    Raises:
        ValueError: the checkout does not have them.
    """
    suite = SUITES[name]
    for origin, target in suite.copied.items():
        if not (source / origin).exists():
            raise ValueError(f"{source} has no {origin}: give a checkout of {suite.url}")
        place = scratch / target
        place.parent.mkdir(parents=True, exist_ok=True)
        if (source / origin).is_dir():
            shutil.copytree(source / origin, place)
        else:
            shutil.copy(source / origin, place)
    for target, text in suite.written.items():
        (scratch / target).write_text(text)
    for target in _test_files(suite, scratch):
        # In the file, so that processes which a test spawns see the names, too.
        alias = f"from benchmarks.peer_aliases import {name} as _alias\n\n_alias()\n"
        text = target.read_text()
        for old, new in () if torch.cuda.is_available() else suite.on_cpu:
            text = text.replace(old, new)
        target.write_text(alias + text)


def _test_files(suite: Suite, scratch: Path) -> Iterator[Path]:
    for target in suite.copied.values():
        place = scratch / target
        if place.suffix == ".py" and place.name not in ("__init__.py", "conftest.py", "utils.py"):
            yield place
        elif place.is_dir():
            yield from place.rglob("test_*.py")


def run_suite(
    name: str, source: Path, seconds: float, extra: Sequence[str] = (), large: bool = False
) -> dict[str, Any]:
    """One suite's outcome.

    Args:
        seconds: after which pytest is stopped; results up to then count.
        large: also what takes long without a GPU.
        extra: arguments of pytest.
    """
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(name, source, scratch)
        report = scratch / "results.jsonl"
        dropped = dict(suite.deselect)
        if not torch.cuda.is_available():
            dropped |= suite.gpu_only | ({} if large else suite.large)
        paths = [*(str(scratch / path) for path in suite.import_path), str(ROOT)]
        command = [sys.executable, "-m", "pytest", *suite.tests, "-p", "benchmarks.peer_plugin", "-q"]
        command += ["-p", "no:cacheprovider", "--rootdir", folder, "-W", "ignore", "--tb=short"]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PEER_REPORT": str(report),
            "PEER_DESELECT": json.dumps(dropped),
            "TORCHDYNAMO_DISABLE": "0" if torch.cuda.is_available() else "1",
        }
        finished = True
        try:
            done = subprocess.run(
                [*command, *extra], cwd=scratch, env=environ, capture_output=True, text=True,
                timeout=seconds,
            )  # fmt: skip
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            finished, output = False, ""
        lines = report.read_text().splitlines() if report.exists() else []
    return {
        "commit": commit_of(source),
        "installed": _version(suite.distribution),
        "finished": finished,
        **outcome(suite, [json.loads(line) for line in lines]),
        **({} if lines else {"output": output[-3000:]}),
    }


def outcome(suite: Suite, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, reasons for what was deselected, and each failure with its kind."""
    tests = [result for result in results if "test" in result]
    counts = Counter(test["outcome"] for test in tests)
    failures = [
        {"test": test["test"], "kind": kind_of(suite, test), "message": _last_line(test["message"])}
        for test in tests
        if test["outcome"] == "failed"
    ]
    return {
        **{name: counts[name] for name in ("passed", "failed", "deselected", "skipped")},
        "selected": sum(result.get("selected", 0) for result in results),
        "reasons": {
            name: dict(Counter(test["message"] for test in tests if test["outcome"] == name))
            for name in ("deselected", "skipped")
        },
        "failures": failures,
    }


def kind_of(suite: Suite, test: dict[str, Any]) -> str:
    """What is known of such a failure."""
    text = f"{test['test']}\n{test['message']}"
    return next((kind for pattern, kind in suite.failures.items() if re.search(pattern, text)), UNKNOWN)


def _last_line(message: str) -> str:
    errors = [
        line[2:].strip() for line in message.splitlines() if line.startswith("E ") and "File" not in line
    ]
    return " ".join(errors)[:300] or message[-300:]


def commit_of(source: Path) -> str | None:
    """Of a git checkout, or as a file COMMIT beside an unpacked archive says."""
    if (source / "COMMIT").is_file():
        return (source / "COMMIT").read_text().strip()
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    if not (source / ".git").exists():
        return None
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def table(outcomes: dict[str, dict[str, Any]]) -> Table:
    columns = ("passed", "failed", "deselected", "skipped")
    shown = Table("suite", "commit", *columns, "not reached")
    for name, found in outcomes.items():
        reached = found["passed"] + found["failed"] + found["skipped"]
        shown.add_row(
            name,
            (found["commit"] or "-")[:10],
            *(str(found[column]) for column in columns),
            str(max(0, found["selected"] - reached)),
        )
    return shown


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, metavar="DIR")
    parser.add_argument("--suite", nargs="+", choices=tuple(SUITES), default=tuple(SUITES))
    parser.add_argument("--minutes", type=float, default=60, help="for one suite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each suite; others are kept")
    parser.add_argument("--large", action="store_true", help="without a GPU, too, every shape")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args(given)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    outcomes: dict[str, dict[str, Any]] = {}
    for name in options.suite:
        if not (options.source / name).is_dir():
            console.print(f"{name}: no folder {options.source / name}; a checkout of {SUITES[name].url}")
            continue
        outcomes[name] = run_suite(
            name, options.source / name, 60 * options.minutes, options.pytest, options.large
        )
        for what, reasons in outcomes[name]["reasons"].items():
            for reason, count in reasons.items():
                console.print(f"{name}: {count} {what}: {reason}")
        for failure in outcomes[name]["failures"]:
            console.print(f"{name}: failed {failure['test']}: {failure['kind']}: {failure['message']}")
        if "output" in outcomes[name]:
            console.print(f"{name}: pytest did not start:\n{outcomes[name]['output']}")
        if options.json:
            _save(options.json, outcomes)
    console.print(table(outcomes))
    unexplained = [f for found in outcomes.values() for f in found["failures"] if f["kind"] == UNKNOWN]
    return 1 if unexplained or not outcomes else 0


def _save(path: Path, outcomes: dict[str, dict[str, Any]]) -> None:
    kept = json.loads(path.read_text()).get("suites", {}) if path.exists() else {}
    about = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    about.pop("command", None)  # full of local paths
    path.write_text(json.dumps({"environment": about, "suites": kept | outcomes}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
