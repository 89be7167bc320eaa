"""Compare answers mathematically with math-verify, in worker processes.

sympy can spend hours on `9^{9^{9^9}}`, in arithmetic that neither a thread's timeout nor math-verify's signal
interrupts. A process can be killed.
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
        # On its own loop: a user's async reward that blocks must not delay comparisons.
        work = asyncio.run_coroutine_threadsafe(self._compare(pairs), event_loop("math_verify"))
        rows = await asyncio.wrap_future(work)
        replies = [*chain(*rows)]
        if log_metric is not None and replies:
            log_metric("math_verify/timeouts", replies.count("timeout") / len(replies))
        return [_best(of_row) for of_row in rows]

    async def _compare(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[list[bool | str | None]]:
        return [*await asyncio.gather(*(self._replies(text, _golds(answers)) for text, answers in pairs))]

    async def _replies(self, text: str, golds: Sequence[str]) -> list[bool | str | None]:
        """Return the replies for one completion, up to the first gold answer that it equals."""
        replies: list[bool | str | None] = []
        for gold in golds:
            replies.append(await POOL.ask([gold, text], self.time_limit))
            if replies[-1] is True:
                break
        return replies


def _golds(answers: Sequence[str]) -> list[str]:
    """Return the expressions to compare with, one for `4` and `4.0`."""
    golds = [answer.rpartition(GSM8K_MARKER)[2].strip() for answer in answers]
    return [*{re.sub(r"(?<=\d)\.0+$", "", gold): gold for gold in reversed(golds) if gold}.values()][::-1]


def _best(replies: Sequence[bool | str | None]) -> float | None:
    return max((float(reply is True) for reply in replies if reply is not None), default=None)


class Pool:
    """Workers that compare concurrently. All calls are on one event loop."""

    def __init__(self, size: int) -> None:
        self.workers = [Worker() for _ in range(size)]
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in self.workers:
            self._idle.put_nowait(worker)

    async def ask(self, question: list[str], time_limit: float) -> bool | str | None:
        """Return the reply to `[gold, text]`, or "timeout"; the limit excludes the wait for a worker."""
        worker = await self._idle.get()
        try:
            return await worker.ask(question, time_limit)
        finally:
            self._idle.put_nowait(worker)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


class Worker:
    """A process that starts at the first question, and again after it was killed."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, question: list[str], time_limit: float) -> bool | str | None:
        """Return the reply, or "timeout" if the process exceeds the limit or dies.

        Raises RuntimeError if the process does not start.
        """
        if self._process is None or self._process.returncode is not None:
            arguments = [sys.executable, "-I", str(SCRIPT), json.dumps(sys.path)]
            # In its own session, because Ctrl-C lets the current step finish.
            self._process = await asyncio.create_subprocess_exec(
                *arguments, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            if not await self._reply("", START_LIMIT):
                problem = "the process for math_verify does not start; its output is above"
                raise RuntimeError(f"{problem}. Try: python -c 'import math_verify'")
        reply = await self._reply(json.dumps(question) + "\n", time_limit)
        return json.loads(reply) if reply else "timeout"

    async def _reply(self, line: str, time_limit: float) -> bytes:
        """Send a line and return the next one; if none comes, kill the process and return nothing."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        reader, writer, reply = self._process.stdout, self._process.stdin, b""

        async def exchange() -> bytes:
            writer.write(line.encode())
            await writer.drain()
            return await reader.readline()

        try:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                reply = await asyncio.wait_for(exchange(), time_limit)
        finally:  # also if canceled: a late reply would answer the next question
            if not reply:
                self.stop()
        return reply

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None


POOL = Pool(max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))))
atexit.register(POOL.stop)
