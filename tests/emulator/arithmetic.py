"""Instructions that compute, on registers, across a warp, and in tensor cores, whose products are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from .ptx import DTYPES, Instruction, forbid, names
from .threads import LANES, Threads

Function = Callable[..., np.ndarray]


def permute(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    x, y, selector = np.broadcast_arrays(x, y, selector)
    pool = np.stack([x, y], 1).view(np.uint8)
    choice = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    forbid(choice & 8, "the emulator does not replicate signs")
    return np.take_along_axis(pool, choice.astype(np.int64), 1).view(np.uint32)[:, 0]


FUNCTIONS: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "rem": np.fmod}
FUNCTIONS |= {"abs": np.abs, "neg": np.negative, "min": np.fmin, "max": np.fmax, "popc": np.bitwise_count}
FUNCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
FUNCTIONS |= {"ex2": np.exp2, "sqrt": np.sqrt, "cvta": lambda x: x, "prmt": permute}
FUNCTIONS |= {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "div": lambda x, y: x / y if x.dtype.kind == "f" else (x - np.fmod(x, y)) // y,
    "mad": lambda x, y, z: x * y + z,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(x.dtype),
    "wide": lambda x, y, z=0: x.astype(f"{x.dtype.kind}{2 * x.itemsize}") * y + z,
    "selp": lambda x, y, chosen: np.where(chosen, x, y),
    # NumPy shifts by more than all bits as PTX does.
    "shl": lambda x, n: x << np.minimum(n, 8 * x.itemsize).astype(x.dtype),
    "shr": lambda x, n: x >> np.minimum(n, 8 * x.itemsize).astype(x.dtype),
    # Shift up and down again, with the sign if it has one.
    "bfe": lambda x, at, n: (
        x << (8 * x.itemsize - at - n).astype(x.dtype) >> 8 * x.itemsize - n.astype(x.dtype)
    ),
}
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
COMPARE |= {"ne": lambda x, y: (x < y) | (x > y), "num": lambda x, y: (x == x) & (y == y)}
COMPARE |= {"leu": lambda x, y: ~(x > y), "geu": lambda x, y: ~(x < y), "neu": np.not_equal}  # or unordered
COMPARE["equ"] = lambda x, y: ~COMPARE["ne"](x, y)
OPERANDS = {"shl": {1: "u32"}, "shr": {1: "u32"}, "bfe": {1: "u32", 2: "u32"}, "selp": {2: "pred"}}
"""Operands that are of another kind than the instruction."""
ROUND = {"rzi": np.trunc, "rpi": np.ceil, "rmi": np.floor}
MODIFIERS = {"rn", "rna", "ftz", "approx", "full", "lo", "wide", "to", "param", "global", *COMPARE, *ROUND}
TINY = np.finfo(np.float32).tiny


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def flush(values: np.ndarray) -> np.ndarray:
    """Return zeros in the place of subnormal float32 numbers."""
    return np.where(np.abs(values) < TINY, values * 0, values) if values.dtype == np.float32 else values


@cache
def operation(parts: tuple[str, ...]) -> tuple[Function, list[str]]:
    """Return an instruction's function and the kinds of its operands."""
    name, *modifiers, kind = parts
    to = modifiers.pop() if name == "cvt" else ""
    forbid(not MODIFIERS.issuperset(modifiers), f"the emulator has no {'.'.join(parts)}")
    function, kinds = FUNCTIONS.get(name), 3 * [kind]
    for operand, other in OPERANDS.get(name, {}).items():
        kinds[operand] = other
    if name == "cvt":
        function, kinds = _conversion(to, kind, modifiers)
    elif name == "setp":
        function = COMPARE[modifiers[0]]
    elif "wide" in modifiers:
        function, kinds[2] = FUNCTIONS["wide"], f"{kind[0]}{16 * DTYPES[kind].itemsize}"
    if kind == "bf16" and name != "cvt":
        result = float32_to_bf16 if name != "setp" else np.asarray
        return lambda *values: result(function(*map(bf16_to_float32, values))), 3 * ["b16"]
    if "ftz" in modifiers:
        return lambda *values: flush(function(*map(flush, values))), kinds
    return function, kinds


def _conversion(to: str, source: str, modifiers: list[str]) -> tuple[Function, list[str]]:
    if to.endswith("x2"):
        narrow, _ = _conversion(to[:-2], source, modifiers)
        bits = lambda x: narrow(x).view(np.uint16).astype(np.uint32)  # noqa: E731
        return lambda x, y: bits(x) << np.uint32(16) | bits(y), ["f32", "f32"]
    if to == "tf32":
        return lambda x: x + np.uint32(0x1000) & np.uint32(0xFFFFE000), ["u32"]
    if "bf16" in (to, source):
        return (float32_to_bf16, ["f32"]) if to == "bf16" else (bf16_to_float32, ["b16"])
    dtype, rounded = DTYPES[to], next((ROUND[part] for part in modifiers if part in ROUND), lambda x: x)
    if DTYPES[source].kind == "f" and dtype.kind != "f":
        low, high = (float(limit) for limit in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        return lambda x: np.nan_to_num(rounded(x.astype(np.float64)).clip(low, high)).astype(dtype), [source]
    return lambda x: rounded(x).astype(dtype), [source]


def compute(threads: Threads, code: Instruction) -> None:
    function, kinds = operation(code.parts)
    values = [threads.read(operand, kind) for operand, kind in zip(code.operands[1:], kinds, strict=False)]
    threads.write(code.operands[0], function(*values))


def move(threads: Threads, code: Instruction) -> None:
    """Copy a register, split it into `{%r1, %r2}`, or join them."""
    into, sources = map(names, code.operands)
    if len(into) == len(sources):
        threads.write(into[0], threads.read(sources[0], code.kind))
        return
    bits = 8 * DTYPES[code.kind].itemsize
    values = np.stack([threads.each(name, f"b{bits // len(sources)}") for name in sources], 1)
    for name, value in zip(into, values.view(DTYPES[f"b{bits // len(into)}"]).T, strict=True):
        threads.write(name, value)


def shuffle(threads: Threads, code: Instruction) -> None:
    value, by, bounds = (threads.each(operand, "s32").reshape(-1, LANES) for operand in code.operands[1:4])
    lane, segment = np.arange(LANES), bounds >> 8 & 31
    limit = lane & segment | bounds & 31 & ~segment
    source = {"up": lane - by, "bfly": lane ^ by, "idx": lane & segment | by & ~segment}[code.parts[2]]
    source = np.where(source >= limit if code.parts[2] == "up" else source <= limit, source, lane)
    absent = ~np.take_along_axis(threads.acting.reshape(-1, LANES), source, 1).ravel()
    forbid(absent & threads.acting, "a shuffle reads a thread that is not there")
    threads.write(names(code.operands[0])[0], np.take_along_axis(value, source, 1).ravel())


def vote(threads: Threads, code: Instruction) -> None:
    """Let a warp answer: who says yes (vote.ballot), who is first (elect), or what the sum is (redux)."""
    group, question, kind = threads.acting.reshape(-1, LANES), code.parts[-2], code.kind
    if kind == "sync":
        first = group.argmax(1)[:, None]
        answers = [first.astype(np.uint32), np.arange(LANES) == first]
    elif question == "ballot":
        yes = threads.each(code.operands[1], "pred").reshape(-1, LANES) & group
        answers = [np.packbits(yes, 1, "little").view(np.uint32)]
    else:
        forbid(group.any(1) != group.all(1), "a warp is reduced whose threads are not all there")
        values = threads.each(code.operands[1], kind).reshape(-1, LANES)
        answers = [FUNCTIONS[question].reduce(values, 1, values.dtype)[:, None]]
    for name, answer in zip(names(code.operands[0]), answers, strict=True):
        threads.write(name, np.broadcast_to(answer, group.shape).ravel())


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


STEPS = dict.fromkeys([*FUNCTIONS, "setp", "cvt"], compute)
STEPS |= {"mov": move, "shfl": shuffle, "vote": vote, "elect": vote, "redux": vote}
STEPS |= {"ldmatrix": move_matrix, "stmatrix": move_matrix, "mma": multiply, "wgmma": multiply_group}
