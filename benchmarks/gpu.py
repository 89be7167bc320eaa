"""`python -m benchmarks.gpu --out DIR`: what is worth knowing from a GPU, the most telling first.

Eight minutes say whether the head is right, how far it is from its goals and where the time goes; more
minutes go on down the list. Each part is a process of its own with a time limit; what fails, breaks the
device or runs late does not stop the next. Two files grow meanwhile: `results.json`, replaced every few
seconds, and `log.txt` with all that was printed. A folder with results is added to.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .record import write_json

ROOT = Path(__file__).resolve().parents[1]
DONE, FAILED, LATE, SKIPPED, RUNNING = "done", "failed", "out of time", "skipped", "running"
LAST_MEASUREMENT, TO_SAVE = 45.0, 10.0  # seconds beyond a part's limit: to end by itself, and when told to
SAVE_EVERY = 10.0  # seconds


@dataclass(frozen=True)
class Part:
    """One command. The words `{json}` and `{log}` in it are where its results go, `{minutes}` its limit."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()  # packages, and programs on the path


def _part(name: str, minutes: float, what: str, command: str, needs: str = "") -> Part:
    """`python` starts this one, a first `bench` a subcommand that keeps its time and writes its record."""
    words = shlex.split(command.replace("bench ", "python -m benchmarks "))
    words += shlex.split("--minutes {minutes} --json {json}") if command.startswith("bench ") else []
    called = tuple(sys.executable if word == "python" else word for word in words)
    return Part(name, what, minutes, called, tuple(needs.split()))


_HEAD = "bench head --tokens 16384 --vocab 151936"
# Verbose: the log says what was found. A file that needs what is not installed does not stop the others.
_PYTEST = "python -m pytest -p no:cacheprovider -v -ra --tb=short --continue-on-collection-errors"
_WORKERS = "-n 8" if importlib.util.find_spec("xdist") else ""  # most of the time goes into compiling
_SMALL = "-k '(pairs or row or small) and not hundred'"  # under compute-sanitizer, whose accesses are slow
_CHECKED = "tests/kernels/test_sparse.py tests/kernels/test_select.py tests/head/test_stress.py"
_OF_HEAD = "tests/head/test_paths.py tests/head/test_stress.py"
_MIDDLE, _WIDE = f"{_HEAD} --hidden 2048", "bench head --tokens 16384 --vocab 128256 --hidden 4096"
_BOTH = "-m 'gpu or not gpu'"
PARTS = (
    _part("environment", 0.5, "versions, tools, ceilings", "python -m benchmarks.machine --json {json}"),
    _part("smoke", 1.8, "right or wrong, at the sizes of the goals; the first compilation", "bench smoke"),
    _part("goals-2048", 1.3, "the head's goals, H = 2048, and flat rows",
          f"{_MIDDLE} --loss logprob --rows histogram flat --impl ours"),
    _part("goals-4096", 0.9, "the head's goals, H = 4096",
          f"{_WIDE} --loss logprob --rows histogram --impl ours"),
    _part("goals-small", 1.2, "the head's goals, H = 896, and H = 1536",
          f"{_HEAD} --hidden 896 1536 --loss logprob --rows histogram --impl ours"),
    _part("peers", 3, "every installed peer beside ours", f"{_MIDDLE} --loss logprob --rows histogram"),
    _part("profile", 1, "kernels of one step, and the gap", "bench profile"),
    _part("peers-flat", 3, "the same on rows where nothing can be left out",
          f"{_MIDDLE} --loss logprob --rows flat"),
    _part("peers-losses", 4, "GRPO, cross-entropy and DPO",
          f"{_MIDDLE} --loss grpo cross_entropy dpo --rows histogram --mode forward_backward --trainable"),
    _part("library", 1, "csrc/ built in place", "python setup.py -q build_ext --inplace", "setuptools"),
    _part("kernels", 3, "each kernel against the ceilings", "bench kernels"),
    _part("tests", 5, "kernels and head against their oracles on the GPU",
          f"{_PYTEST} {_BOTH} {_WORKERS} {_OF_HEAD} tests/kernels --ignore=tests/kernels/test_aot.py",
          "pytest"),
    *(_part(tool, 4, f"compute-sanitizer {tool} on small kernels",
            f"compute-sanitizer --tool {tool} --error-exitcode 9 "
            f"{_PYTEST} {_BOTH} {_SMALL} --maxfail=3 {_CHECKED}", "pytest compute-sanitizer")
      for tool in ("memcheck", "racecheck", "initcheck")),
    _part("plan", 2, "the plan's bytes against the allocator's, and memory away from the GPU",
          f"{_PYTEST} -m gpu tests/plan tests/policy tests/rollout --ignore=tests/rollout/vllm", "pytest"),
    _part("engine", 7, "vLLM beside the trainer: every way of the weights, every sleep, 200 cycles",
          f"{_PYTEST} -m gpu tests/rollout/vllm", "pytest vllm"),
    _part("train", 5, "whole steps beside TRL's, both with vLLM, 4 x 16 completions",
          "bench train --repeats 1", "vllm datasets"),
    _part("train-64", 6, "the same, 4 x 64 completions",
          "bench train --group 64 --repeats 1", "vllm datasets"),
    _part("group", 6, "the largest group in one micro-batch, ours and TRL's",
          "bench group --model Qwen2.5-1.5B --prompt 512 --completion 2048 --impl ours TRL",
          "transformers datasets"),
    _part("step", 5, "one update of a real architecture", "bench step", "transformers"),
    _part("rollout", 5, "an engine's cycle: generate, sleep, sync, wake", "bench rollout", "vllm"),
)  # fmt: skip
"""By value: whether it is right, the goals, the open questions, the peers; what takes long comes last."""


PartState = dict[str, Any]


class Hour:
    """A folder with `results.json`, what each part has left so far, and `log.txt`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.parts = earlier(out)

    def save(self, name: str, found: PartState) -> PartState:
        self.parts[name] = found
        write_json(self.out / "results.json", {"started": self.started, "parts": self.parts})
        return found

    def run(self, part: Part, minutes: float) -> PartState:
        """One part; what it left is saved.

        A peer whose kernel breaks the device takes along what was measured beside it: then the part runs
        once more without it.
        """
        absent = [n for n in part.needs if importlib.util.find_spec(n) is None and shutil.which(n) is None]
        if absent:
            return self.save(part.name, {"state": SKIPPED, "why": f"{', '.join(absent)} not installed"})
        deadline, broken, before = time.monotonic() + 60 * minutes, [], {}
        while True:
            without = ("--without", *broken) if broken else ()
            found = self._run_command(part.name, (*part.command, *without), deadline, before)
            result = found.get("result")
            culprit = result.get("culprit") if isinstance(result, dict) else None
            if culprit is None or culprit in broken or time.monotonic() >= deadline:
                return found
            broken.append(culprit)
            before = {"broke the device": list(broken), "before": found}

    def _run_command(
        self, name: str, command: Sequence[str], deadline: float, before: PartState
    ) -> PartState:
        """Saves its state and the JSON it left, beside `before`, while it runs too."""
        with tempfile.TemporaryDirectory() as folder, (self.out / "log.txt").open("a") as log:
            place, start = Path(folder) / f"{name}.json", time.monotonic()
            minutes = f"{(deadline - start) / 60:.2f}"
            values = {"{json}": str(place), "{log}": f"{place}.log", "{minutes}": minutes}
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
            environment.pop("TRITON_INTERPRET", None)
            child = subprocess.Popen(
                [values.get(word, word) for word in command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            # A command that keeps its own budget may finish its last measurement.
            deadline += LAST_MEASUREMENT if "{minutes}" in command else 0
            while child.poll() is None and (left := deadline - time.monotonic()) > 0:
                self.save(name, {"state": RUNNING} | _written(place) | before)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(min(SAVE_EVERY, left))
            if child.poll() is None:
                code, state = _end(child), LATE
            else:
                code = child.returncode
                state = FAILED if code else DONE
            ended = {"state": state, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
            return self.save(name, ended | _written(place) | before)


def _written(place: Path) -> PartState:
    """What a command has left in its files: JSON, or the text of half a file where it was killed."""
    found = {}
    for suffix in ("", ".log"):
        file = Path(f"{place}{suffix}")
        if file.is_file():
            text = file.read_text()
            try:
                found[f"result{suffix}"] = json.loads(text)
            except ValueError:
                found[f"result{suffix}"] = text
    return found


def _end(child: subprocess.Popen) -> int:
    """As Ctrl-C first, so that it saves what it has; then all that it started, by force."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(TO_SAVE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def run(parts: Sequence[Part], minutes: float, out: Path) -> int:
    """Runs parts until all are done or the time is spent; 0 when every part that ran was done."""
    out.mkdir(parents=True, exist_ok=True)
    deadline, hour = time.monotonic() + 60 * minutes, Hour(out)
    states, waiting = set(), []
    for part in parts:
        with (out / "log.txt").open("a") as log:
            log.write(f"\n{'=' * 30} {part.name}: {part.what}\n")
        left = (deadline - time.monotonic()) / 60
        if left > 0.1:
            found = hour.run(part, min(part.minutes, left))
        else:
            found = {"state": SKIPPED, "why": "the time is spent"}
            waiting.append(part.name)
            if part.name not in hour.parts:
                hour.save(part.name, found)
        states.add(found["state"])
        note = found.get("why") or f"{found['seconds']:.0f} s, exit code {found['exit_code']}"
        print(f"{part.name:<14} {found['state']:<12} {note}", flush=True)
    if waiting:
        print(f"go on with: python -m benchmarks.gpu --out {out} --only {' '.join(waiting)}", flush=True)
    return 1 if states & {FAILED, LATE} else 0


def earlier(out: Path) -> dict[str, PartState]:
    """What parts left in this folder before: a run adds to it, and replaces only what it runs again."""
    path = out / "results.json"
    return json.loads(path.read_text())["parts"] if path.is_file() else {}


def unpack(out: Path, folder: Path) -> int:
    """Writes the record of every part that was done as a file of its own, for `report` and `readme`."""
    for name, part in earlier(out).items():
        if part["state"] == DONE and isinstance(part.get("result"), dict | list):
            path = folder / f"gpu_{name.replace('-', '_')}.json"
            write_json(path, part["result"])
            print(path)
    return 0


def main(arguments: list[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json and log.txt")
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget of the whole command (8)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--skip", nargs="+", choices=names, metavar="PART", default=[])
    parser.add_argument(
        "--unpack", type=Path, metavar="FOLDER", help="run nothing: write each part's record there"
    )
    options = parser.parse_args(arguments)
    if options.unpack is not None:
        return unpack(options.out, options.unpack)
    chosen = [p for p in PARTS if p.name in (options.only or names) and p.name not in options.skip]
    return run(chosen, options.minutes, options.out)


if __name__ == "__main__":
    sys.exit(main())
