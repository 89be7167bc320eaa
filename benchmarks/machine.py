"""`python -m benchmarks.machine`: what a measurement is made on: versions, tools, clocks, and ceilings."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .environment import environment, gpu_state
from .timing import seconds_of, summarise

TOOLS = ("nvcc", "g++", "ncu", "compute-sanitizer", "cuobjdump")
_SIDE = {"cuda": 8192, "cpu": 512}


def machine() -> dict[str, Any]:
    """Everything about the device and its software; takes a few seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = _SIDE[device.type]
    x, w = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    x @ w.T
    product = summarise([seconds_of(lambda: x @ w.T, device) for _ in range(15)])
    return environment(device) | {
        "gpu_state": gpu_state(device),
        "bf16_product_tflops": 2 * side**3 / product.median * 1e-9,
        "tools": {tool: shutil.which(tool) for tool in TOOLS},
        "packages": {found.metadata["Name"]: found.version for found in metadata.distributions()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    found = machine()
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "packages"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
