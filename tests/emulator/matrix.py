"""Tensor cores: fragments of matrices in registers and in shared memory. Products are exact, then rounded."""

from __future__ import annotations

import numpy as np

from .alu import bf16_to_float32
from .ptx import Instruction, forbid, names
from .threads import LANES, Threads

SPAN = {1: 128, 2: 64, 3: 32}  # bytes of a row, by the swizzle mode of a descriptor


def swizzled(places: np.ndarray, span: int) -> np.ndarray:
    """Exclusive-or the number of each unit of 16 bytes with that of its row; a row has `span` bytes."""
    return places ^ (places >> 3 & span - 16)


def layout(count: int, pair: int) -> tuple[slice, np.ndarray, np.ndarray]:
    """Return where in (warps, 16, columns) each lane's `count` numbers are, `pair` of them in a register."""
    lane, number = np.ix_(np.arange(LANES), np.arange(count))
    register = number // pair
    return np.s_[:, lane // 4 + 8 * (register % 2), (register // 2 * 4 + lane % 4) * pair + number % pair]


def move_matrix(threads: Threads, code: Instruction) -> None:
    """Load or store 8 x 8 halves per register; a thread holds the address of a row of 16 bytes."""
    loads, turned = code.parts[0] == "ldmatrix", "trans" in code.parts
    registers, address = code.operands if loads else code.operands[::-1]
    count, lanes = len(names(registers)), threads.lanes
    rows = lanes[lanes % LANES < 8 * count]
    addresses = (threads.base + threads.address(address))[rows]
    if loads:
        data = threads.shared.read(threads, rows, addresses, 16).view(np.uint16).reshape(-1, count, 8, 8)
        words = np.ascontiguousarray(data.swapaxes(2, 3) if turned else data).view(np.uint32)
        threads.write_columns(registers, words.transpose(0, 2, 3, 1).reshape(-1, count))
    else:
        words = threads.columns(registers, "b32").reshape(-1, 8, 4, count).transpose(0, 3, 1, 2)
        data = np.ascontiguousarray(words).view(np.uint16)
        data = np.ascontiguousarray(data.swapaxes(2, 3) if turned else data).reshape(-1, 8)
        threads.shared.write(threads, rows, addresses, data.view(np.uint8))


def numbers(words: np.ndarray, kind: str) -> np.ndarray:
    """Return float64 of 16 or 32 bits; tf32 ignores the last 13."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return (bf16_to_float32(words) if kind == "bf16" else words.view(np.float16)).astype(np.float64)


def fragment(words: np.ndarray, kind: str) -> np.ndarray:
    """(warps, 16, depth) of A, of which words (lanes, registers) hold two halves or a tf32 number each."""
    pair = 1 if kind == "tf32" else 2
    held = np.ascontiguousarray(words).view(f"u{4 // pair}").reshape(-1, LANES, words.shape[1] * pair)
    a = np.empty((len(held), 16, held.shape[2] * 2))
    a[layout(held.shape[2], pair)] = numbers(held, kind)
    return a


def accumulate(threads: Threads, into: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """D = A Bᵀ + C, of which each lane holds pairs of columns."""
    b = b.swapaxes(1, 2)
    d = a @ b if np.isfinite(a).all() and np.isfinite(b).all() else np.einsum("gik,gkj->gij", a, b)
    held = d.reshape(-1, 16, d.shape[2])[layout(d.shape[2] // 2, 2)].reshape(len(threads.lanes), -1)
    threads.write_columns(into, (held + c).astype(np.float32))


def multiply(threads: Threads, code: Instruction) -> None:
    """D = A B + C of a warp, all in registers: 16 x 8."""
    into, *operands = code.operands
    a, b, c = (threads.columns(operand, "b32") for operand in operands)
    # Bᵀ has the layout of the upper half of A.
    a, b = (fragment(words, code.parts[-2]) for words in (a, np.repeat(b, 2, 1)))
    accumulate(threads, into, a, b[:, :8], c.view(np.float32))


def shared_matrix(
    threads: Threads, operand: str, rows: int, depth: int, kind: str, turned: bool
) -> np.ndarray:
    """(groups, rows, depth) float64 of shared memory, as a descriptor says; `turned`: rows are contiguous."""
    first, size = threads.lanes[:: 4 * LANES], 4 if kind == "tf32" else 2
    descriptors = threads.each(operand, "u64")[first]
    forbid(descriptors >> 16 != descriptors[0] >> 16, "operands of different layouts in one instruction")
    common = int(descriptors[0])
    leading, stride, span = (common >> 16 & 0x3FFF) << 4, (common >> 32 & 0x3FFF) << 4, SPAN[common >> 62]
    i, j = np.ix_(np.arange(rows), np.arange(depth))
    if turned:
        units = span // size
        place = i % units * size + i // units * leading + j % 8 * span + j // 8 * stride
    else:
        place = i // 8 * stride + i % 8 * span + j * size
    begin = (descriptors.astype(np.int64) & 0x3FFF)[:, None, None] << 4
    places = threads.base[first, None, None] + swizzled(begin + place, span)
    cell, at = threads.shared.locate(places.ravel(), size)
    threads.shared.check_written(at)
    return numbers(threads.shared.cells(size)[cell].view(f"u{size}"), kind).reshape(places.shape)


def multiply_group(threads: Threads, code: Instruction) -> None:
    """D += A B of four warps: 64 x n, with B and perhaps A in shared memory. It is computed at once."""
    if code.parts[1] != "mma_async":
        return
    kind, lanes = code.kind, threads.lanes
    columns, depth = map(int, code.parts[4].removeprefix("m64n").split("k"))
    into, a, b, adds, _, _, *turned = code.operands
    groups = threads.acting.reshape(-1, 4 * LANES)
    forbid(groups.any(1) != groups.all(1), "wgmma without all four warps")
    if "{" in a:
        left = fragment(threads.columns(a, "b32"), kind).reshape(-1, 64, depth)
    else:
        left = shared_matrix(threads, a, 64, depth, kind, turned[:1] == ["1"])
    right = shared_matrix(threads, b, columns, depth, kind, turned[-1:] == ["1"])
    adding = threads.each(adds, "pred")[lanes, None]
    before = threads.columns(into, "f32") if adding.any() else np.float32(0)
    accumulate(threads, into, left, right, np.where(adding, before, np.float32(0)))


STEPS = {"ldmatrix": move_matrix, "stmatrix": move_matrix, "mma": multiply, "wgmma": multiply_group}
