"""Peak memory of a process, by the operating system: what stands in for a driver's count on a CPU."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_RESET_PEAK = "5"  # proc(5), clear_refs: the peak becomes the present size


def resident_bytes(process: int | str = "self") -> int | None:
    """Resident now; None where the system does not say or the process has ended."""
    return _status(process, "VmRSS")


def peak_bytes(process: int | str = "self") -> int | None:
    """The most that was ever resident, since the last reset."""
    return _status(process, "VmHWM")


def peak_of(call: Callable[[], object]) -> int | None:
    """Bytes by which the process grew at its largest while `call` ran; None where nobody counts.

    Memory that the C library kept from earlier calls is handed back first, else it would hide what `call`
    takes.
    """
    gc.collect()
    _trim()
    if not _reset_peak():
        call()
        return None
    held = resident_bytes()
    call()
    peak = peak_bytes()
    return None if held is None or peak is None else max(0, peak - held)


def _status(process: int | str, field: str) -> int | None:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _trim() -> None:
    """glibc's; other C libraries have no such call and need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
