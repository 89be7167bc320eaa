"""`python -m benchmarks.gpu --out DIR`: what is worth knowing from an hour on a GPU, the most telling first.

Each part is a command of its own with a time limit; what fails or runs late does not stop the next. Two files
grow while it runs: `results.json`, replaced after every part, and `log.txt` with all that was printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HISTOGRAM = "benchmarks/results/live_tiles_qwen2.5_coder_1.5b.json"
PYTHON = sys.executable
DONE, FAILED, LATE, SKIPPED = "done", "failed", "out of time", "skipped"


@dataclass(frozen=True)
class Part:
    """One command. The words `{json}` and `{log}` in it are where its results go, `{minutes}` its limit."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]
    missing: Callable[[], str | None] = lambda: None  # why it cannot run here


def _needs(*modules: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        return f"{', '.join(absent)} not installed" if absent else None

    return missing


def _needs_tools(*tools: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [tool for tool in tools if shutil.which(tool) is None]
        return f"{', '.join(absent)} not on PATH" if absent else _needs("pytest")()

    return missing


def _head(name: str, what: str, minutes: float, *options: str) -> Part:
    command = (PYTHON, "-m", "benchmarks", "head", "--minutes", "{minutes}", "--json", "{json}")
    rows = ("--histogram", HISTOGRAM, "--tokens", "16384")
    return Part(name, what, minutes, (*command, *rows, *options))


def _tests(name: str, what: str, minutes: float, *options: str, tool: Sequence[str] = ()) -> Part:
    # Verbose: what a test found is in the log even when the part runs out of time.
    pytest = (PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-ra", "--tb=short", *options)
    missing = _needs_tools(tool[0]) if tool else _needs("pytest")
    if not tool and importlib.util.find_spec("xdist"):
        pytest = (*pytest, "-n", "8")  # most of the time goes into compiling
    return Part(name, what, minutes, (*tool, *pytest), missing)


def _sanitizer(tool: str, minutes: float) -> Part:
    """Small cases of every kernel: checked accesses are slow."""
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
    cases = ("tests/kernels/test_sparse.py", "tests/kernels/test_select.py", "tests/head/test_stress.py")
    chosen = ("-m", "gpu or not gpu", "-k", "(pairs or row or small) and not hundred", "--maxfail=3", *cases)
    return _tests(tool, f"compute-sanitizer {tool} on small kernels", minutes, *chosen, tool=command)


GOALS = ("--rows", "histogram", "--impl", "ours")
PARTS = (
    Part(
        "environment",
        "versions, tools, ceilings",
        0.6,
        (PYTHON, "-m", "benchmarks.machine", "--json", "{json}"),
    ),
    Part(
        "compile",
        "Triton's cache filled by many processes",
        1.2,
        (PYTHON, "-m", "benchmarks.tune", "--compile-only", "--processes", "14"),
    ),
    _head("goals-2048", "the head's goals, H = 2048", 1.5, *GOALS, "--hidden", "2048", "--vocab", "151936"),
    Part(
        "profile",
        "kernels of one step, and the gap",
        1,
        (PYTHON, "-m", "benchmarks.profile_head", "--json", "{json}"),
    ),
    _head("goals-4096", "the head's goals, H = 4096", 1.2, *GOALS, "--hidden", "4096", "--vocab", "128256"),
    _head("goals-small", "the head's goals, H = 896 and 1536", 1.5, *GOALS, "--hidden", "896", "1536",
          "--vocab", "151936"),
    Part(
        "library",
        "csrc/ built in place",
        1,
        (PYTHON, "setup.py", "-q", "build_ext", "--inplace"),
        _needs("setuptools"),
    ),
    _tests("tests", "kernels and head against their oracles on the GPU", 5, "-m", "gpu or not gpu",
           "tests/head/test_accelerated.py", "tests/head/test_cuda.py", "tests/head/test_stress.py",
           "tests/kernels", "--ignore=tests/kernels/test_aot.py"),
    Part(
        "tune",
        "every kernel's sizes, and csrc/ against Triton",
        5,
        (PYTHON, "-m", "benchmarks.tune", "--minutes", "{minutes}", "--out", "{json}", "--log", "{log}"),
    ),
    _head("peers", "every installed peer beside ours", 5, "--rows", "histogram", "flat", "--hidden", "2048",
          "--vocab", "151936"),
    Part(
        "kernels",
        "each kernel against the ceilings",
        3,
        (PYTHON, "-m", "benchmarks", "kernels", "--minutes", "{minutes}", "--json", "{json}", "--rows",
         "histogram", "--histogram", HISTOGRAM),
    ),
    *(
        Part(
            f"sparse-{tolerance}",
            f"stages of the sparse backward, tolerance {tolerance}",
            1,
            (PYTHON, "-m", "benchmarks.sparse", "--tolerance", tolerance, "--variants", "shipped"),
        )
        for tolerance in ("1.0", "0.75", "0.25")
    ),
    _sanitizer("memcheck", 4),
    _sanitizer("racecheck", 4),
    _sanitizer("initcheck", 4),
    Part(
        "rollout",
        "an engine's cycle: generate, sleep, sync, wake",
        5,
        (PYTHON, "-m", "benchmarks", "rollout", "--minutes", "{minutes}", "--json", "{json}"),
        _needs("vllm"),
    ),
)  # fmt: skip


def run_part(part: Part, minutes: float, folder: Path, log: Any) -> dict[str, Any]:
    """How it ended, and the JSON it left."""
    if why := part.missing():
        return {"state": SKIPPED, "why": why}
    place = folder / f"{part.name}.json"
    values = {"{json}": str(place), "{log}": f"{place}.log", "{minutes}": f"{minutes:.2f}"}
    filled = [values.get(word, word) for word in part.command]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}
    environment.pop("TRITON_INTERPRET", None)
    start = time.monotonic()
    child = subprocess.Popen(
        filled, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        # A command that keeps its own budget may finish its last measurement.
        code = child.wait(60 * minutes + (20 if "{minutes}" in part.command else 0))
        state = DONE if code == 0 else FAILED
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        code, state = child.wait(), LATE
    found = {"state": state, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    for suffix in ("", ".log"):
        written = Path(f"{place}{suffix}")
        if written.is_file():
            found[f"result{suffix}"] = _read(written)
    return found


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _read(path: Path) -> Any:
    """A part that was killed may leave half a file: then its text."""
    text = path.read_text()
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(parts: Sequence[Part], minutes: float, out: Path) -> int:
    """Runs parts until all are done or the time is spent; 0 when every part that ran was done."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    found = {"started": datetime.now(timezone.utc).isoformat(timespec="seconds"), "parts": {}}
    with tempfile.TemporaryDirectory() as folder, (out / "log.txt").open("a") as log:
        for part in parts:
            left = (deadline - time.monotonic()) / 60
            log.write(f"\n{'=' * 30} {part.name}: {part.what}\n")
            log.flush()
            if left <= 0.1:
                result = {"state": SKIPPED, "why": "the time is spent"}
            else:
                result = run_part(part, min(part.minutes, left), Path(folder), log)
            found["parts"][part.name] = result
            _save(out / "results.json", found)
            note = result.get("why") or f"{result['seconds']:.0f} s, exit code {result['exit_code']}"
            print(f"{part.name:<14} {result['state']:<12} {note}", flush=True)
    states = [result["state"] for result in found["parts"].values()]
    return 1 if FAILED in states or LATE in states else 0


def _save(path: Path, found: dict[str, Any]) -> None:
    """Replaced at once: a reader sees the state before or after a part."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json and log.txt")
    parser.add_argument("--minutes", type=float, default=50.0, help="time budget of the whole command (50)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--skip", nargs="+", choices=names, metavar="PART", default=[])
    options = parser.parse_args(arguments)
    chosen = [p for p in PARTS if p.name in (options.only or names) and p.name not in options.skip]
    return run(chosen, options.minutes, options.out)


if __name__ == "__main__":
    sys.exit(main())
