"""One process at a time trains in a run's folder."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


class RunInUse(RuntimeError):
    """Another process trains in the folder."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder, which exists, against every other process, also one on another host.

    The operating system's lock on `run.lock` ends with its process, however that ends. The file stays, with
    the name of the last holder: were it deleted, two processes could hold a lock of that name.

    Raises:
        RunInUse: another process holds it; the message names host, process and start.
    """
    with (run_dir / LOCK_FILE).open("a+") as file:
        os.register_at_fork(after_in_child=file.close)  # a worker that outlives the run would hold it on
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "another process"
            raise RunInUse(
                f"output_dir = {str(run_dir)!r} is in use: {other} trains there. Wait for its end or stop "
                "it, then continue with --resume; or choose another output_dir"
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing keeps a second process out", run_dir, error.strerror
            )
        started = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}, started {started}\n")
        file.flush()
        os.fsync(file.fileno())  # for `holder` on other hosts
        yield


def holder(run_dir: Path) -> str:
    """What the lock of a folder says of its last holder."""
    path = run_dir / LOCK_FILE
    return path.read_text() if path.exists() else ""
