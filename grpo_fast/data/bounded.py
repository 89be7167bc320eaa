"""Run work that may not end in a forked process with limits of time, memory and output."""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

LIMIT_SECONDS = 10  # of CPU time; a chat template takes a millisecond
LIMIT_BYTES = 1 << 30  # on top of the memory of this process
LIMIT_CHARACTERS = 1 << 24
_TEXT, _ERROR, _EXCEEDED = b"=", b"!", b"#"  # how the child's reply begins


def run_bounded(work: Callable[[], str]) -> str:
    """Return what `work` returns, called in a fork of this process.

    Raises:
        ValueError: it exceeded a limit, raised an error or crashed.
    """
    incoming, outgoing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no locks of threads
        child = os.fork()
    if child == 0:
        _work_within_limits(work, outgoing)
    os.close(outgoing)
    reply, deadline = b"", time.monotonic() + 12 * LIMIT_SECONDS  # CPU time is slower on a busy machine
    with open(incoming, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := file.read(1 << 16)):
                break
            reply += part
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kind, text = reply[:1], reply[1:].decode("utf-8", "surrogatepass")
    if kind == _TEXT:
        return text
    if kind == _EXCEEDED or (not kind and code in (-signal.SIGKILL, -signal.SIGXCPU)):
        raise ValueError(
            f"it takes more than {LIMIT_SECONDS} seconds, {LIMIT_BYTES >> 30} GiB or {LIMIT_CHARACTERS:,} "
            "characters: look for a loop or a macro without end"
        )
    raise ValueError(text or f"its process ended with code {code} and without output")


def _work_within_limits(work: Callable[[], str], outgoing: int) -> None:
    import resource

    def limit(kind: int, wanted: int) -> None:
        hard = resource.getrlimit(kind)[1]
        with suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (most, hard))

    try:
        with suppress(OSError), open("/proc/self/statm", encoding="ascii") as statm:
            limit(resource.RLIMIT_AS, int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + LIMIT_BYTES)
        limit(resource.RLIMIT_CORE, 0)
        limit(resource.RLIMIT_CPU, LIMIT_SECONDS)
        try:
            kind, text = _TEXT, work()
        except (MemoryError, OverflowError, RecursionError):
            kind, text = _EXCEEDED, ""
        except Exception as error:
            kind, text = _ERROR, str(error)
        if len(text) > LIMIT_CHARACTERS:
            kind, text = _EXCEEDED, ""
        with open(outgoing, "wb") as file:
            file.write(kind + text.encode("utf-8", "surrogatepass"))
    finally:
        os._exit(0)
