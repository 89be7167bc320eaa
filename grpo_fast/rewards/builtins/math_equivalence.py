"""Mathematical equivalence by math-verify, in worker processes.

sympy can spend hours on `9^{9^{9^9}}`, inside arithmetic that neither a thread's time limit nor math-verify's
signal interrupts. A process can be killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_fast.rewards.builtins.options import CompletionTexts, LogMetric, Scores, answer_pairs, reward
from grpo_fast.rewards.builtins.text import GSM8K_MARKER
from grpo_fast.rewards.calls import event_loop

SCRIPT = Path(__file__).with_name("math_worker.py")
START_LIMIT = 120.0  # seconds that importing sympy may take on a busy machine
MOST_WORKERS = 8


@reward
class MathVerify:
    """1 where the completion's final answer equals a gold one, 0 elsewhere, None where there is no gold.

    Gold answers are LaTeX with or without `$`, plain expressions, or GSM8K's text with `####`. The metric
    `math_verify/timeouts` is the share of comparisons that exceeded `time_limit` or the memory of a worker.
    """

    answer_column: str = "answer"
    time_limit: Annotated[float, Field(gt=0)] = 5.0  # seconds for one completion; beyond: not equal

    async def __call__(
        self,
        completions: CompletionTexts,
        log_metric: LogMetric | None = None,
        **columns: Any,
    ) -> Scores:
        pairs = answer_pairs(completions, columns, self.answer_column)
        # A loop of its own: a user's async reward that blocks must not make comparisons late.
        work = asyncio.run_coroutine_threadsafe(self._compare(pairs), event_loop("math_verify"))
        rows = await asyncio.wrap_future(work)
        replies = [*chain(*rows)]
        if log_metric is not None and replies:
            log_metric("math_verify/timeouts", replies.count("timeout") / len(replies))
        return [_best(of_row) for of_row in rows]

    async def _compare(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[list[bool | str | None]]:
        return [*await asyncio.gather(*(self._replies(text, _golds(answers)) for text, answers in pairs))]

    async def _replies(self, text: str, golds: Sequence[str]) -> list[bool | str | None]:
        """Return the replies for one completion, to the first gold that it equals."""
        replies: list[bool | str | None] = []
        for gold in golds:
            replies += await POOL.ask([[gold, text]], self.time_limit)
            if replies[-1] is True:
                break
        return replies


def _golds(answers: Sequence[str]) -> list[str]:
    """Return the expressions to compare with; of `4` and `4.0` one."""
    golds = [answer.rpartition(GSM8K_MARKER)[2].strip() for answer in answers]
    return [*{re.sub(r"(?<=\d)\.0+$", "", gold): gold for gold in reversed(golds) if gold}.values()][::-1]


def _best(replies: Sequence[bool | str | None]) -> float | None:
    return max((float(reply is True) for reply in replies if reply is not None), default=None)


class Pool:
    """Workers that answer questions at the same time. All calls are on one event loop."""

    def __init__(self, size: int) -> None:
        self.workers = [Worker() for _ in range(size)]
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in self.workers:
            self._idle.put_nowait(worker)

    async def ask(self, questions: Sequence[list[str]], time_limit: float) -> list[bool | str | None]:
        """Return each question's reply, or "timeout"; the limit counts from the start of its comparison.

        Raises:
            RuntimeError: a process does not start.
        """
        return [*await asyncio.gather(*(self._ask(question, time_limit) for question in questions))]

    async def _ask(self, question: list[str], time_limit: float) -> bool | str | None:
        worker = await self._idle.get()
        try:
            return await worker.ask(question, time_limit)
        finally:
            self._idle.put_nowait(worker)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


class Worker:
    """A process, started when first needed and again after it was killed."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, question: list[str], time_limit: float) -> bool | str | None:
        """Return the reply, or "timeout" when there is none in `time_limit` seconds or the process dies.

        Raises:
            RuntimeError: the process does not start.
        """
        if self._process is None or self._process.returncode is not None:
            arguments = [sys.executable, "-I", str(SCRIPT), json.dumps(sys.path)]
            # In a session of its own: Ctrl-C, after which the step still ends, must not reach it.
            self._process = await asyncio.create_subprocess_exec(
                *arguments, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            if not await self._reply("", START_LIMIT):
                raise RuntimeError(
                    "the process for math_verify does not start; what it printed is above. Try: "
                    "python -c 'import math_verify'"
                )
        reply = await self._reply(json.dumps(question) + "\n", time_limit)
        return json.loads(reply) if reply else "timeout"

    async def _reply(self, line: str, time_limit: float) -> bytes:
        """Send a line and return the next one; empty, with the process killed, where none comes."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        reader, writer, reply = self._process.stdout, self._process.stdin, b""

        async def exchange() -> bytes:
            writer.write(line.encode())
            await writer.drain()
            return await reader.readline()

        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                reply = await asyncio.wait_for(exchange(), time_limit)
        finally:  # also when it is canceled: a late reply would answer the next question
            if not reply:
                self.stop()
        return reply

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None


POOL = Pool(max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))))
atexit.register(POOL.stop)
