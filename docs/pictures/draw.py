"""Draw the pictures of docs/how from checked-in records: `python docs/pictures/draw.py`."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLUE, RED, GRAY, LIGHT, GREEN = "#1f5fa8", "#c0392b", "#8a929c", "#cfe0f3", "#2e8b57"
plt.rcParams.update({"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "grpo_fast"})


def save(name: str) -> None:
    plt.savefig(HERE / name, metadata={"Date": None}, bbox_inches="tight")
    plt.close()


def tiles() -> None:
    """Draw how many vocabulary tiles of a token can hold a visible part of its gradient."""
    record = json.loads((ROOT / "benchmarks" / "live_tiles_qwen2.5_coder_1.5b.json").read_text())
    counts = {int(tiles): rows for tiles, rows in record["rows_by_live_tiles"].items()}
    total = -(-record["vocabulary"] // 128)
    values = sorted(tiles for tiles, rows in counts.items() for _ in range(rows))
    share = [100 * (i + 1) / len(values) for i in range(len(values))]
    _, axes = plt.subplots(figsize=(7, 3.2))
    axes.step(values, share, color=BLUE, where="post")
    axes.set(xscale="log", xlim=(1, total), ylim=(0, 100))
    axes.set_xticks([1, 10, 100, total], ["1", "10", "100", f"{total:,}"])
    axes.set(xlabel=f"active tiles of a token, of {total:,}", ylabel="tokens with at most that many, %")
    middle = values[len(values) // 2]
    axes.annotate(
        f"half of the tokens: {middle} or fewer",
        (middle, 50),
        (3 * middle, 42),
        arrowprops={"arrowstyle": "-", "color": GRAY},
    )
    axes.grid(alpha=0.3)
    save("tiles.svg")


def row() -> None:
    """Draw the probability of each vocabulary tile of one real token, and the threshold."""
    record = json.loads((HERE / "row.json").read_text())
    tiles, threshold = record["tile_probability"], record["threshold"]
    _, axes = plt.subplots(figsize=(8, 3))
    for name, color, above in (
        ("always visited", BLUE, True),
        ("visited with probability w / τ", GRAY, False),
    ):
        places = [i for i, tile in enumerate(tiles) if (tile >= threshold) == above]
        heights = [max(tiles[i], 1e-9) for i in places]
        axes.vlines(places, 1e-9, heights, color=color, linewidth=2.5 if above else 0.9, label=name)
    axes.axhline(threshold, color=RED, linewidth=1)
    axes.text(len(tiles), threshold, " τ", color=RED, va="center")
    axes.set(yscale="log", ylim=(1e-9, 2), xlim=(0, len(tiles)))
    axes.set(xlabel=f"vocabulary tile of one token, of {len(tiles)}", ylabel="probability in the tile")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    axes.set_yticks([1e-9, 1e-6, 1e-3, 1], ["1e-9", "1e-6", "0.001", "1"])
    axes.minorticks_off()
    save("row.svg")


def error() -> None:
    """Draw the error of a weight behind SmolLM2's head from the table of the study."""
    text = (ROOT / "benchmarks" / "results" / "tried.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| V 49,152 \| ([\d,]+) \| sequences of \d+(?: and \d\d)? \| (.*) \|$", text, re.M)
    tokens, series = [], {"sampled (ours)": [], "filtered by blocks": [], "dropped": []}
    for number, rest in rows:
        *_, sampled, dropped, filtered = rest.split(" | ")
        tokens.append(int(number.replace(",", "")))
        for name, cell in zip(series, (sampled, filtered, dropped), strict=True):
            series[name].append(float(cell.rpartition(" · ")[2]))
    _, axes = plt.subplots(figsize=(7, 3.4))
    for (name, values), color in zip(series.items(), (BLUE, GRAY, RED), strict=True):
        axes.plot(tokens, values, "o-", color=color, label=name)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="tokens in the batch")
    axes.set(ylabel="error, in units of bfloat16 rounding")
    axes.set_xticks([300, 1000, 3000, 10000, 30000], ["300", "1,000", "3,000", "10,000", "30,000"])
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    save("error.svg")


def packing() -> None:
    """Draw one group of four completions, padded and packed."""
    prompt, lengths = 6, (7, 4, 9, 5)
    figure, (padded, packed) = plt.subplots(2, 1, figsize=(8, 3.6), height_ratios=(4, 1.3))
    for row, length in enumerate(lengths):
        y, longest = len(lengths) - 1 - row, max(lengths)
        padded.broken_barh([(0, prompt)], (y, 0.8), color=LIGHT)
        padded.broken_barh([(prompt, length)], (y, 0.8), color=BLUE)
        padded.broken_barh([(prompt + length, longest - length)], (y, 0.8), color="white", edgecolor=GRAY)
    total = len(lengths) * (prompt + max(lengths))
    padded.set_title(f"padded: {total} positions", loc="left", fontsize=11)
    packed.broken_barh([(0, prompt)], (0, 0.8), color=LIGHT)
    start = prompt
    for length in lengths:
        packed.broken_barh([(start, length - 0.15)], (0, 0.8), color=BLUE)
        start += length
    packed.set_title(f"packed: {start} positions", loc="left", fontsize=11)
    for axes in (padded, packed):
        axes.set(xlim=(0, start), yticks=[], xticks=[])
        axes.spines[:].set_visible(False)
    bars = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (LIGHT, BLUE)]
    bars.append(plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=GRAY))
    figure.legend(bars, ["prompt", "completion", "padding"], loc="lower right", frameon=False, ncols=3)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    save("packing.svg")


def colocation() -> None:
    """Draw who holds the GPU's memory over one step; the heights are not to scale."""
    phases = ("rollout", "sleep", "update", "sync", "wake")
    edges = (0, 4, 4.6, 8, 8.6, 9.2)
    parts = {
        "weights (shared)": (BLUE, (3, 3, 3, 3, 3)),
        "KV cache": (GREEN, (5, 0, 0, 0, 5)),
        "activations, gradients": (RED, (0, 0, 5, 0, 0)),
    }
    _, axes = plt.subplots(figsize=(8, 3.2))
    widths = [after - before for before, after in pairwise(edges)]
    below = [0] * len(phases)
    for name, (color, heights) in parts.items():
        axes.bar(edges[:-1], heights, widths, below, color=color, align="edge", label=name, alpha=0.85)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for phase, left, width in zip(phases, edges, widths, strict=False):
        axes.text(left + width / 2, 8.25, phase, ha="center", rotation=0 if width > 1 else 60)
    axes.axhline(8, color="black", linewidth=0.8)
    axes.set(ylim=(0, 9.6), xlim=(0, edges[-1]), yticks=[8], yticklabels=["GPU"], xticks=[], xlabel="time")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.spines[["top", "right"]].set_visible(False)
    save("colocation.svg")


if __name__ == "__main__":
    for draw in (tiles, row, error, packing, colocation):
        draw()
