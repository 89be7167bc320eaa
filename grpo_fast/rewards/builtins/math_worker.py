"""Compare two mathematical texts; run as a script, in a process that may be killed.

Reads JSON lines `[gold, text]`; writes `true`, `false`, or `null` if the gold answer has no expression. The
first argument is the module search path; nothing of this package is imported.
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

PR_SET_PDEATHSIG = 1  # of Linux: the signal when the parent ends
MEMORY_LIMIT = 1 << 30  # bytes of address space; sympy takes 0.1 GiB
DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")  # delimiters of LaTeX


def main() -> None:
    if sys.platform == "linux":  # end with the run, even if that is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = json.loads(sys.argv[1])
    from math_verify import parse, verify

    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    logging.disable(logging.CRITICAL)  # math-verify logs every answer that it cannot parse

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
        except Exception:  # sympy raises any type
            reply = False
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
