"""Mathematical equivalence by math-verify, in a process of its own.

sympy can spend hours on `9^{9^{9^9}}`, inside arithmetic that neither a thread's time limit nor math-verify's
signal interrupts. A process can be killed.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Annotated

from pydantic import Field

from grpo_fast.rewards.builtins.options import AnswerReward, reward
from grpo_fast.rewards.builtins.text import GSM8K_MARKER
from grpo_fast.rewards.calls import in_thread

SCRIPT = Path(__file__).with_name("math_worker.py")
START_LIMIT = 120.0  # seconds that importing sympy may take on a busy machine


@reward
class MathVerify(AnswerReward):
    """1 where the completion's final answer equals the gold one, 0 elsewhere, None where there is no gold.

    Gold answers are LaTeX with or without `$`, plain expressions, or GSM8K's text with `####`.
    """

    time_limit: Annotated[float, Field(gt=0)] = 5.0  # seconds for one completion; beyond: not equal

    def score(self, text: str, answer: str) -> float | None:
        gold = answer.rpartition(GSM8K_MARKER)[2].strip()
        equal = WORKER.ask([gold, text], self.time_limit) if gold else None
        return None if equal is None else float(equal)


class Worker:
    """The process, started when first needed and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: list[str], time_limit: float) -> bool | None:
        """The reply, or False when there is none in `time_limit` seconds or the process dies of the question.

        Raises:
            RuntimeError: the process does not start.
        """
        with self._lock:
            process = self._running()
            try:
                print(json.dumps(question), file=process.stdin, flush=True)
                reply = _read_line(process, time_limit)
            except BrokenPipeError:
                reply = ""
            if reply:
                return json.loads(reply)
            self.stop()
            return False

    def stop(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        if not _read_line(self._process, START_LIMIT):
            self.stop()
            raise RuntimeError(
                "the process for math_verify does not start; what it printed is above. Try: "
                "python -c 'import math_verify'"
            )
        return self._process


def _read_line(process: subprocess.Popen[str], time_limit: float) -> str:
    """What the process writes next; nothing when it has ended, or writes nothing in `time_limit` seconds."""
    assert process.stdout is not None
    line = in_thread(process.stdout.readline)
    return line.result() if wait([line], time_limit).done else ""


WORKER = Worker()
atexit.register(WORKER.stop)
