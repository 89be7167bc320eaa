"""`python -m benchmarks.sparse`: the time of each stage of the certified sparse backward, and its best sizes.

Rows are made, not taken from a model: each target stands out by `--peak`, the other logits are normal.
The density printed is the one the selection found; compare with a real model's before concluding. Times are
medians, and multiples of one product X Wᵀ by the vendor's library. Needs a GPU to mean anything.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

VARIANTS = {
    "shipped": {},
    "pairs: 64 rows": {"pair_rows": 64},
    "pairs: 4 stages": {"pair_stages": 4},
    "pairs: 2 programs per multiprocessor": {"pair_programs": 2},
    "dW: 4 warps": {"weight_warps": 4},
    "dW: 128 rows a step": {"weight_depth": 128},
    "dX: 8 entries in flight": {"row_entries": 8},
    "dX: 8 warps": {"row_warps": 8},
    "chunk of 256 MiB": {"chunk_bytes": 256 << 20},
}
"""The open questions: changes of the shipped configuration, one at a time."""


@dataclass(frozen=True)
class Rows:
    """A batch and its forward statistics."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (N,)
    g: Tensor  # (N,) float32
    tile_lse: Tensor  # (T, N) float32
    logsumexp: Tensor  # (N,) float32
    logprob: Tensor  # (N,) float32


def make_rows(
    count: int, vocabulary: int, depth: int, peak: float, spread: float, device: torch.device
) -> Rows:
    """Normal logits of the given spread, and `peak` more for the target."""
    from grpo_fast.kernels import TILE

    kind = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(vocabulary, depth, **kind) / depth**0.5
    targets = torch.randint(vocabulary, (count,), device=device)
    hidden = (spread * torch.randn(count, depth, **kind) + peak * weight[targets]).to(torch.bfloat16)
    tiles = -(-vocabulary // TILE)
    lse = torch.empty(tiles, count, device=device)
    for start in range(0, tiles, 64):
        part = hidden.float() @ weight[start * TILE : (start + 64) * TILE].float().T
        for tile, columns in enumerate(part.split(TILE, 1)):
            lse[start + tile] = columns.logsumexp(1)
    logsumexp = lse.logsumexp(0)
    target_logit = (hidden.float() * weight[targets].float()).sum(1)
    g = torch.randn(count, device=device) / count
    return Rows(hidden, weight, targets, g, lse, logsumexp, (target_logit - logsumexp).clamp(max=0))


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` runs after one that compiles."""
    run()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def stages(rows: Rows, tolerance: float, changes: dict[str, int], repeats: int) -> dict[str, float]:
    """Milliseconds of the selection, the backward, and the backward with a side frozen; what came out."""
    from grpo_fast.kernels.select import select_pairs
    from grpo_fast.kernels.sparse import sparse_backward
    from grpo_fast.kernels.sparse_config import HALF

    def select():
        return select_pairs(
            rows.tile_lse, rows.logsumexp, rows.targets, rows.logprob, rows.g,
            vocabulary=rows.weight.shape[0], tolerance=tolerance, itemsize=2, config=replace(HALF, **changes),
        )  # fmt: skip

    def backward(**wanted: bool):
        return sparse_backward(rows.hidden, rows.weight, rows.targets, rows.logsumexp, pairs, **wanted)

    pairs = select()
    result = backward()
    return {
        "select": milliseconds(select, repeats),
        "backward": milliseconds(backward, repeats),
        "dX alone": milliseconds(lambda: backward(want_weight=False), repeats),
        "dW alone": milliseconds(lambda: backward(want_hidden=False), repeats),
        "density": pairs.metrics()["density"].item(),
        "bound": pairs.metrics(result.left_out)["error_bound"].item(),
        "to dense": float(result.dense.any()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--peak", type=float, default=24.0, help="how far the target's logit stands out")
    parser.add_argument("--spread", type=float, default=2.5, help="standard deviation of the other logits")
    parser.add_argument("--tolerance", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = make_rows(options.rows, options.vocabulary, options.depth, options.peak, options.spread, device)

    part = rows.weight[: 1 << 15]
    product = milliseconds(lambda: rows.hidden @ part.T, options.repeats) * len(rows.weight) / len(part)
    print(f"X Wᵀ: {product:.2f} ms (in parts of {len(part)} columns) on {_name(device)}\n")
    print(
        "| variant | select | backward | dX alone | dW alone | select + backward / X Wᵀ | density | bound |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for variant in options.variants:
        got = stages(rows, options.tolerance, VARIANTS[variant], options.repeats)
        times = " | ".join(f"{got[name]:.2f} ms" for name in ("select", "backward", "dX alone", "dW alone"))
        share = (got["select"] + got["backward"]) / product
        note = " (left to the dense path)" if got["to dense"] else ""
        print(f"| {variant} | {times} | {share:.2f} | {got['density']:.2%} | {got['bound']:.2f}{note} |")


def _name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name() if device.type == "cuda" else "the interpreter: no figure means anything"
    )


if __name__ == "__main__":
    main()
