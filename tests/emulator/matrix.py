"""Tensor cores: fragments of matrices in registers and in shared memory. Products are exact, then rounded."""

from __future__ import annotations

import numpy as np

from .alu import bf16_to_float32
from .ptx import Fault, Instruction, names
from .threads import LANES, Threads

ROW, PAIR = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2  # of a lane's numbers in an 8 x 8 fragment
SPAN = {1: 128, 2: 64, 3: 32}  # bytes of a row, by the swizzle mode of a descriptor


def swizzled(places: np.ndarray, span: int) -> np.ndarray:
    """Exclusive-or the number of each unit of 16 bytes with that of its row; a row has `span` bytes."""
    return places ^ (places >> 3 & span - 16)


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


def fragment(words: np.ndarray, kind: str, depth: int) -> np.ndarray:
    """(warps, 16, depth) of A, of which words (lanes, registers) hold two halves or a tf32 number each."""
    words = np.ascontiguousarray(words.reshape(-1, LANES, words.shape[1]))
    a = np.empty((len(words), 16, depth))
    for i in range(words.shape[2]):
        row, column = ROW + 8 * (i & 1), (i >> 1) * (depth // 2)
        if kind == "tf32":
            a[:, row, column + PAIR // 2] = numbers(words[..., i], kind)
        else:
            a[:, row, column + PAIR] = numbers((words[..., i] & 0xFFFF).astype(np.uint16), kind)
            a[:, row, column + PAIR + 1] = numbers((words[..., i] >> 16).astype(np.uint16), kind)
    return a


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A Bᵀ."""
    b = b.swapaxes(1, 2)
    return a @ b if np.isfinite(a).all() and np.isfinite(b).all() else np.einsum("gik,gkj->gij", a, b)


def multiply(threads: Threads, code: Instruction) -> None:
    """D = A B + C of a warp, all in registers: 16 x 8."""
    kind, depth = code.parts[-2], int(code.parts[3].partition("k")[2])
    into, *operands = code.operands
    a, b, c = (threads.columns(operand, "b32") for operand in operands)
    # Bᵀ has the layout of the upper half of A.
    upper = fragment(np.repeat(b, 2, 1), kind, depth)[:, :8]
    result = product(fragment(a, kind, depth), upper)
    register = np.arange(4)
    values = result[:, ROW[:, None] + 8 * (register >> 1), PAIR[:, None] + (register & 1)].reshape(-1, 4)
    threads.write_columns(into, (values + c.view(np.float32)).astype(np.float32))


def shared_matrix(
    threads: Threads, operand: str, shape: tuple[int, int], kind: str, turned: bool
) -> np.ndarray:
    """(groups, rows, depth) float64 of shared memory, as a descriptor says; `turned`: rows are contiguous."""
    first, size = threads.lanes[:: 4 * LANES], 4 if kind == "tf32" else 2
    descriptors = threads.each(operand, "s64")[first]
    layout = int(descriptors[0]) & 0xFFFF_FFFF_FFFF_FFFF
    if (descriptors >> 16 != descriptors[0] >> 16).any():
        raise Fault("operands of different layouts in one instruction")
    leading, stride, span = (layout >> 16 & 0x3FFF) << 4, (layout >> 32 & 0x3FFF) << 4, SPAN[layout >> 62]
    i, j = np.ix_(*map(np.arange, shape))
    if turned:
        units = span // size
        place = i % units * size + i // units * leading + j % 8 * span + j // 8 * stride
    else:
        place = i // 8 * stride + i % 8 * span + j * size
    begin = (descriptors & 0x3FFF)[:, None, None] << 4
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
    if not threads.acting.reshape(-1, 4 * LANES).all(1).sum() * 4 * LANES == len(lanes):
        raise Fault("wgmma without all four warps")
    if "{" in a:
        left = fragment(threads.columns(a, "b32"), kind, depth).reshape(-1, 64, depth)
    else:
        left = shared_matrix(threads, a, (64, depth), kind, turned[:1] == ["1"])
    result = product(left, shared_matrix(threads, b, (columns, depth), kind, turned[-1:] == ["1"]))
    lane, register = np.arange(4 * LANES)[:, None], np.arange(columns // 2)  # who holds what of D
    row = 16 * (lane // LANES) + lane % LANES // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + lane % 4 * 2 + register % 2
    values = result[:, row, column].reshape(len(lanes), -1)
    if (adding := threads.each(adds, "pred")[lanes, None]).any():
        values = values + np.where(adding, threads.columns(into, "f32"), np.float32(0))
    threads.write_columns(into, values.astype(np.float32))


STEPS = {"ldmatrix": move_matrix, "stmatrix": move_matrix, "mma": multiply, "wgmma": multiply_group}
