"""What the device can do at best, measured among the others: the vendor's product, and a copy."""

from __future__ import annotations

from functools import partial

import torch

from .contest import Entrant, Prepared, Work
from .problem import DTYPES

PRODUCT, COPY = "matrix product of the vendor's library", "copy"
_COPY_BYTES = {"cuda": 1 << 29}
_COPY_BYTES_ELSEWHERE = 1 << 26
_SQUARE = {"cuda": 8192}
_SQUARE_ELSEWHERE = 1024


def product(rows: int, depth: int, columns: int, dtype: str, device: torch.device, seed: int = 0) -> Entrant:
    """X (rows, depth) times Wᵀ, W (columns, depth), of normal numbers; the result is written to memory."""
    return Entrant(PRODUCT, partial(_product, rows, depth, columns, dtype, device, seed), ceiling=True)


def square_product(dtype: str, device: torch.device) -> Entrant:
    """A product large enough for the full rate: what a whole model's arithmetic is compared with."""
    side = _SQUARE.get(device.type, _SQUARE_ELSEWHERE)
    return product(side, side, side, dtype, device)


def copy(device: torch.device) -> Entrant:
    """From memory to memory, far larger than any cache."""
    return Entrant(COPY, partial(_copy, device), ceiling=True)


def _product(rows: int, depth: int, columns: int, dtype: str, device: torch.device, seed: int) -> Prepared:
    kind = {
        "dtype": DTYPES[dtype],
        "device": device,
        "generator": torch.Generator(device).manual_seed(seed),
    }
    x, w = torch.randn(rows, depth, **kind), torch.randn(columns, depth, **kind)
    height = max(1, min(rows, _room(device) // (columns * x.element_size())))
    out = x.new_empty(height, columns)

    def run(_: object) -> None:
        for part in x.split(height):
            torch.mm(part, w.T, out=out[: len(part)])

    return Prepared(run, Work(flops=2.0 * rows * depth * columns))


def _copy(device: torch.device) -> Prepared:
    size = _COPY_BYTES.get(device.type, _COPY_BYTES_ELSEWHERE)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Prepared(lambda _: target.copy_(source), Work(bytes=2.0 * size))


def _room(device: torch.device) -> int:
    """Bytes that the product's result may take, without crowding out the others."""
    return torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else 1 << 28
