"""Compares two mathematical texts; run as a script, in a process that may be killed.

Reads JSON lines `[gold, text]`, writes `true`, `false`, or `null` where the gold has no expression. Imports
nothing of this package. The first argument is the module search path to use.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import re
import signal
import sys
from functools import lru_cache

PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets at its parent's end
MEMORY_LIMIT = 1 << 30  # bytes of address space; sympy takes 0.1 GiB
DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")  # the marks of LaTeX in a text


def main() -> None:
    if sys.platform == "linux":  # or it would go on alone where its run is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = json.loads(sys.argv[1])
    from math_verify import parse, verify

    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    logging.disable(logging.CRITICAL)  # what cannot be parsed is an answer, not a message

    @lru_cache(maxsize=4096)
    def expressions(text: str) -> list:
        return parse(text, parsing_timeout=None)

    def gold_expressions(gold: str) -> list:
        return (not DELIMITED.search(gold) and expressions(rf"\boxed{{{gold}}}")) or expressions(gold)

    def equivalent(gold: str, text: str) -> bool | None:
        expected = gold_expressions(gold)
        if not expected:
            return None
        return bool(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))

    replies, sys.stdout = sys.stdout, sys.stderr  # nothing but replies may reach the pipe
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = equivalent(*json.loads(line))
        except MemoryError:
            break
        except Exception:  # sympy raises all sorts of things at what models write
            reply = False
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
