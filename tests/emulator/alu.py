"""Instructions that compute: each thread on its registers, or the threads of a warp on each other's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from .ptx import DTYPES, Fault, Instruction, names
from .threads import LANES, Threads

Function = Callable[..., np.ndarray]
SIMPLE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod}
SIMPLE |= {"abs": np.abs, "neg": np.negative, "min": np.fmin, "max": np.fmax, "popc": np.bitwise_count}
SIMPLE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
SIMPLE |= {"ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}
SIMPLE |= {"cvta": lambda x: x, "rcp": np.reciprocal}
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
COMPARE |= {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal, "neu": np.not_equal}
COMPARE |= {"ne": lambda x, y: (x < y) | (x > y), "num": lambda x, y: (x == x) & (y == y)}
COMPARE |= {"ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y)}  # or unordered
COMPARE |= {"gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y)}
ROUND = {"rzi": np.trunc, "rni": np.rint, "rpi": np.ceil, "rmi": np.floor}
REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or}
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
    name, kind = parts[0], parts[-1]
    if name == "cvt":
        return _conversion(*parts[-2:], parts)
    if kind == "bf16":
        raise Fault("the emulator has no arithmetic in bfloat16")
    same, shift, dtype = 3 * [kind], [kind, "u32", "u32"], DTYPES[kind]
    bits, integer = 8 * dtype.itemsize, dtype.kind in "iu"
    match name:
        case "setp" if parts[1] in COMPARE and parts[2:3] in ([], (kind,), ("ftz",)):
            return COMPARE[parts[1]], same
        case "selp":
            return lambda x, y, chosen: np.where(chosen, x, y), [kind, kind, "pred"]
        case "shl" | "shr":  # NumPy shifts by more than all bits as PTX does
            by = np.left_shift if name == "shl" else np.right_shift
            return lambda x, n: by(x, np.minimum(n, bits).astype(dtype)), shift
        case "prmt":
            return _permute, same
        case "bfe":  # shifted up and down again, with the sign if it has one
            return lambda x, at, n: x << (bits - at - n).astype(dtype) >> (bits - n).astype(dtype), shift
        case "fma":
            return lambda x, y, z: (x.astype(np.float64) * y + z).astype(dtype), same
        case "mul" | "mad" if integer and parts[1] == "wide":
            wide = f"{kind[0]}{2 * bits}"
            return lambda x, y, z=0: x.astype(DTYPES[wide]) * y + z, [kind, kind, wide]
        case "mul" if parts[1] == "hi" and bits == 32:
            return lambda x, y: (x.astype(f"{dtype.kind}8") * y >> 32).astype(dtype), same
        case "mad" if parts[1] == "lo":
            return lambda x, y, z: x * y + z, same
        case "div" if integer:
            return lambda x, y: (x - np.fmod(x, y)) // y, same
    if name not in SIMPLE or {"NaN", "hi", "sat"} & {*parts}:
        raise Fault(f"the emulator has no {'.'.join(parts)}")
    return SIMPLE[name], same


def _permute(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    x, y, selector = np.broadcast_arrays(x, y, selector)
    pool = np.stack([x, y], 1).view(np.uint8)
    choice = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    if (choice & 8).any():
        raise Fault("the emulator does not replicate signs")
    return np.take_along_axis(pool, choice.astype(np.int64), 1).view(np.uint32)[:, 0]


def _conversion(to: str, source: str, parts: tuple[str, ...]) -> tuple[Function, list[str]]:
    if to.endswith("x2"):
        narrow, _ = _conversion(to[:-2], source, ())
        high = lambda x: narrow(x).view(np.uint16).astype(np.uint32) << np.uint32(16)  # noqa: E731
        return lambda x, y: high(x) | narrow(y).view(np.uint16), ["f32", "f32"]
    if to == "tf32":
        return lambda x: x + np.uint32(0x1000) & np.uint32(0xFFFFE000), ["u32"]
    if "bf16" in (to, source):
        return float32_to_bf16 if to == "bf16" else bf16_to_float32, [source]
    dtype, rounded = DTYPES[to], next((ROUND[part] for part in parts if part in ROUND), lambda x: x)
    if DTYPES[source].kind == "f" and dtype.kind != "f":
        low, high = (float(limit) for limit in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        return lambda x: np.nan_to_num(rounded(x.astype(np.float64)).clip(low, high)).astype(dtype), [source]
    return lambda x: rounded(x).astype(dtype), [source]


def compute(threads: Threads, code: Instruction) -> None:
    function, kinds = operation(code.parts)
    values = [threads.read(operand, kind) for operand, kind in zip(code.operands[1:], kinds, strict=False)]
    if "ftz" in code.parts:
        threads.write(code.operands[0], flush(function(*map(flush, values))))
    else:
        threads.write(code.operands[0], function(*values))


def move(threads: Threads, code: Instruction) -> None:
    """Copy a register, split it into `{%r1, %r2}`, or join them."""
    into, source = code.operands
    if "{" not in into + source:
        return threads.write(into, threads.read(source, code.kind))
    part = f"b{8 * DTYPES[code.kind].itemsize // max(len(names(into)), len(names(source)))}"
    if "{" in into:
        values = np.ascontiguousarray(threads.read(source, code.kind))[:, None].view(DTYPES[part])
        for name, value in zip(names(into), values.T, strict=True):
            threads.write(name, value)
        return None
    values = np.stack([threads.each(name, part) for name in names(source)], 1)
    return threads.write(into, values.view(DTYPES[code.kind])[:, 0])


def _by_warp(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, LANES)


def shuffle(threads: Threads, code: Instruction) -> None:
    value, by, bounds = (_by_warp(threads.each(operand, "s32")) for operand in code.operands[1:4])
    lane, segment = np.arange(LANES), bounds >> 8 & 31
    limit = lane & segment | bounds & 31 & ~segment
    source = {"up": lane - by, "bfly": lane ^ by, "idx": lane & segment | by & ~segment}[code.parts[2]]
    source = np.where(source >= limit if code.parts[2] == "up" else source <= limit, source, lane)
    if not np.take_along_axis(_by_warp(threads.acting), source, 1).ravel()[threads.acting].all():
        raise Fault("a shuffle reads a thread that is not there")
    threads.write(names(code.operands[0])[0], np.take_along_axis(value, source, 1).ravel())


def vote(threads: Threads, code: Instruction) -> None:
    """Let a warp answer: who says yes (vote.ballot), who is first (elect), or what the sum is (redux)."""
    group, question, kind = _by_warp(threads.acting), code.parts[-2], code.kind
    if kind == "sync":
        first = group.argmax(1)[:, None]
        answers = [first.astype(np.uint32), np.arange(LANES) == first]
    elif question == "ballot":
        yes = _by_warp(threads.each(code.operands[1], "pred")) & group
        answers = [np.packbits(yes, 1, "little").view(np.uint32)]
    elif (group.any(1) != group.all(1)).any():
        raise Fault("a warp is reduced whose threads are not all there")
    else:
        values = _by_warp(threads.each(code.operands[1], kind))
        answers = [REDUCE[question].reduce(values, 1, values.dtype)[:, None]]
    for name, answer in zip(names(code.operands[0]), answers, strict=True):
        threads.write(name, np.broadcast_to(answer, group.shape).ravel())


OTHERS = ["setp", "selp", "shl", "shr", "cvt", "prmt", "bfe", "fma", "mad"]
STEPS = dict.fromkeys([*SIMPLE, *OTHERS], compute)
STEPS |= {"mov": move, "shfl": shuffle, "vote": vote, "elect": vote, "redux": vote}
