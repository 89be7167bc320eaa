"""Run all measurements that need a GPU, the most telling first: `python -m benchmarks.gpu --out DIR`.

Each part runs in its own process with a time limit, and does not stop the next. `DIR/NAME.json` is its
record, `DIR/NAME.log` its output, `DIR/summary.json` the state of each. The same command again continues with
the parts that have not run, then with those that failed; `--only` also repeats those that are done.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import yaml
from packaging.requirements import Requirement

from grpo_fast.config.paths import user_path
from grpo_fast.record.files import write_whole

from .measure import NO_TIME

ROOT = Path(__file__).resolve().parents[1]
TO_END = 45.0  # seconds beyond a part's limit, for its last measurement
TO_DIE = 10.0  # seconds for a killed part to free the device
BENCHMARK = ["python", "-m", "benchmarks"]
DONE, FAILED, LATE, SKIPPED = "done", "failed", "out of time", "skipped"


class Part(NamedTuple):
    """One command: a benchmark, `python ...`, or a program."""

    name: str
    minutes: float
    command: str
    needs: str = ""  # distributions, some with a bound on their version, and programs on the path


_PYTEST = "python -m pytest -p no:cacheprovider -v -ra --tb=short --continue-on-collection-errors"
_WORKERS = "-n 8" if importlib.util.find_spec("xdist") else ""  # most of the time goes into compiling
PARTS = [
    Part(**part | {"command": part["command"].format(pytest=_PYTEST, workers=_WORKERS)})
    for part in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
]


def run_part(part: Part, minutes: float, out: Path) -> dict[str, object]:
    """Run one part for at most so many minutes; return its state."""
    words, record = shlex.split(part.command), out / f"{part.name}.json"
    ours = words[0] not in ("python", "compute-sanitizer")
    needs = [*part.needs.split(), *["pytest-benchmark"] * ours]
    if absent := [need for need in needs if not _has(need)]:
        return {"state": SKIPPED, "why": f"{', '.join(absent)} not installed"}
    if ours:
        record.unlink(missing_ok=True)
        saved = ["--minutes", f"{minutes:.2f}", "--benchmark-json", str(record), "--benchmark-quiet", "-ra"]
        words = [*BENCHMARK, *words, *saved]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    start = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        words = [sys.executable if word == "python" else word for word in words]
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            code = child.wait(60 * minutes + TO_END)
            # 1: a peer failed, which the record says. 2: a peer broke the device, which stopped the rest.
            state = DONE if code == 0 or (code == 1 and record.exists()) else FAILED
        except subprocess.TimeoutExpired:
            code, state = None, LATE
            for end in (signal.SIGINT, signal.SIGKILL):  # at the first, pytest writes its record
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, end)
                    code = child.wait(TO_DIE)  # the device may hold a process
    printed = (out / f"{part.name}.log").read_text(errors="replace")
    state = LATE if state == DONE and ours and NO_TIME in printed else state  # part was not measured
    line = r"^(?:\[gw.*?\] )?(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$|^(\S+::.+?) (?:FAILED|ERROR)\b"
    failures = {"".join(names).strip() for names in re.findall(line, printed, re.MULTILINE)}
    found = {"state": state, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    return found | ({"failures": sorted(failures)} if failures else {})


def _has(need: str) -> bool:
    """Return whether a distribution is installed in a version that fits, or a program."""
    asked = Requirement(need)
    try:
        return asked.specifier.contains(metadata.version(asked.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return not asked.specifier and shutil.which(asked.name) is not None


def run(parts: Sequence[Part], minutes: float, out: Path, again: bool = False) -> int:
    """Run parts until all are done or the time is over; return 1 where one failed or ran late."""
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    found = json.loads(summary.read_text()) if summary.exists() else {}
    deadline = time.monotonic() + 60 * minutes
    for part in sorted(parts, key=lambda part: found.get(part.name, {}).get("state") in (FAILED, LATE)):
        if not again and found.get(part.name, {}).get("state") == DONE:
            print(f"{part.name:<14} done before", flush=True)
            continue
        left = (deadline - time.monotonic()) / 60
        found[part.name] = {"state": SKIPPED, "why": NO_TIME}
        if left > 0.1:
            found[part.name] = run_part(part, min(part.minutes, left), out)
        write_whole(summary, json.dumps(found, indent=1).encode())
        print(f"{part.name:<14}", *found[part.name].values(), flush=True)
    return int(any(found[part.name]["state"] in (FAILED, LATE) for part in parts))


def main(arguments: list[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=user_path, required=True, help="folder of the records and logs")
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget of the whole command (10)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    options = parser.parse_args(arguments)
    chosen = [part for part in PARTS if part.name in (options.only or names)]
    return run(chosen, options.minutes, options.out, again=bool(options.only))


if __name__ == "__main__":
    sys.exit(main())
