"""Where a measurement is made: versions, tools, clocks, revision, command, and what the device does at best.

`python -m benchmarks.machine` prints all of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fast.record.logs import provenance

from .contest import BYTES, FLOPS, Entrant, Prepared
from .measure import seconds_of
from .problem import DTYPES
from .record import write_json

PEER_PACKAGES = ("trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels", "unsloth-zoo")
TOOLS = ("nvcc", "g++", "ncu", "compute-sanitizer", "cuobjdump")
VENDORS_PRODUCT, COPY = "matrix product of the vendor's library", "copy"
_GPU_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")
_COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}
_SIDE = {"cuda": 8192, "cpu": 1024}  # of a square product large enough for the full rate


def environment(device: torch.device) -> dict[str, Any]:
    """Everything needed to judge or repeat a run; measures the copy bandwidth, a fraction of a second."""
    found = provenance() | {"command": _command(sys.orig_argv[1:])}
    installed = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    found["versions"] |= {name: installed[name] for name in PEER_PACKAGES if name in installed}
    found["cuda"] = torch.version.cuda
    found["git"] = _git()
    found["benchmark_device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else found["device"]
    )
    found["copy_gigabytes_per_second"] = _rates(copy(device), device)[BYTES] / 1e9
    return found


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Clocks, temperature and power now; None without an NVIDIA driver's tool."""
    if device.type != "cuda":
        return None
    uuid, asked = f"GPU-{torch.cuda.get_device_properties(device).uuid}", ",".join(_GPU_STATE)
    line = _output("nvidia-smi", f"--id={uuid}", f"--query-gpu={asked}", "--format=csv,noheader")
    values = line.splitlines()[0].split(", ") if line else []
    return dict(zip(_GPU_STATE, values, strict=True)) if len(values) == len(_GPU_STATE) else None


def _command(words: Sequence[str]) -> list[str]:
    """As one would type it: no path of this machine, and not where the results went."""
    kept = [word for before, word in pairwise(["", *words]) if "--json" not in (before, word)]
    return ["python", *kept] if kept[0].startswith("-") else [Path(kept[0]).name, *kept[1:]]


def _git() -> dict[str, Any] | None:
    here = str(Path(__file__).parent)
    revision = _output("git", "-C", here, "rev-parse", "HEAD")
    if not revision:
        return None
    return {"revision": revision, "changed": bool(_output("git", "-C", here, "status", "--porcelain"))}


def _output(*command: str) -> str:
    """What a command prints, stripped; nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def product(rows: int, depth: int, columns: int, dtype: str, device: torch.device, seed: int = 0) -> Entrant:
    """X (rows, depth) times Wᵀ, W (columns, depth), of normal numbers; the result is written to memory."""

    def prepare() -> Prepared:
        generator = torch.Generator(device).manual_seed(seed)
        kind = {"dtype": DTYPES[dtype], "device": device, "generator": generator}
        x, w = torch.randn(rows, depth, **kind), torch.randn(columns, depth, **kind)
        return Prepared(multiplication([(x, w)]), {FLOPS: 2.0 * rows * depth * columns})

    return Entrant(VENDORS_PRODUCT, prepare, ceiling=True)


def square_product(dtype: str, device: torch.device) -> Entrant:
    """A product large enough for the full rate: what a whole model's arithmetic is compared with."""
    side = _SIDE[device.type]
    return product(side, side, side, dtype, device)


def copy(device: torch.device) -> Entrant:
    """From memory to memory, far larger than any cache."""

    def prepare() -> Prepared:
        source = torch.randint(0, 255, (_COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return Prepared(lambda _: target.copy_(source), {BYTES: 2.0 * source.nbytes})

    return Entrant(COPY, prepare, ceiling=True)


def multiplication(operands: Sequence[tuple[Tensor, Tensor]]) -> Callable[[object], None]:
    """One X Wᵀ a call, of each (N, H) and (V, H) in turn, in parts where the result is huge."""
    (x, w), *_ = operands
    room = torch.cuda.mem_get_info(x.device)[0] // 8 if x.is_cuda else 1 << 28  # bytes
    rows = max(1, min(len(x), room // (len(w) * x.element_size())))
    out = x.new_empty(rows, len(w))
    turns = itertools.cycle(operands)

    def run(_: object) -> None:
        x, w = next(turns)
        for part in x.split(rows):
            torch.mm(part, w.T, out=out[: len(part)])

    return run


def _rates(ceiling: Entrant, device: torch.device) -> dict[str, float]:
    """At the median of a few repetitions."""
    prepared = ceiling.prepare()
    seconds_of(lambda: prepared.run(None), device, 1)  # the first call sets the library up
    seconds = seconds_of(lambda: prepared.run(None), device, 9).median / 1e3
    return {name: amount / seconds for name, amount in prepared.work.items()}


def machine() -> dict[str, Any]:
    """Everything about the device and its software; takes a few seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return environment(device) | {
        "gpu_state": gpu_state(device),
        "bf16_product_tflops": _rates(square_product("bfloat16", device), device)[FLOPS] / 1e12,
        "tools": {tool: shutil.which(tool) for tool in TOOLS},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    found = machine()
    write_json(options.json, found)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
