"""How many vocabulary tiles of a row matter: counting them, and histograms of the counts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

TILE = 128
HISTOGRAM = Path(__file__).parent / "results" / "live_tiles_qwen2.5_coder_1.5b.json"
"""The checked-in one, in a checkout."""
THRESHOLD = 1e-5  # a tile is live when one of its probabilities is larger
PART_ROWS = 64 * TILE
_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class Histogram:
    """Rows by their number of live tiles, and where they come from."""

    source: str  # the model and how its rows were sampled
    vocabulary: int
    rows_by_live_tiles: dict[int, int]
    tile: int = TILE
    threshold: float = THRESHOLD
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        return -(-self.vocabulary // self.tile)

    @property
    def density(self) -> float:
        rows = sum(self.rows_by_live_tiles.values())
        return sum(k * n for k, n in self.rows_by_live_tiles.items()) / (rows * self.tiles)

    def draw(self, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
        """(rows,) int64 counts of live tiles; another vocabulary keeps the share of tiles."""
        counts = torch.tensor(list(self.rows_by_live_tiles), dtype=torch.float64)
        weights = torch.tensor(list(self.rows_by_live_tiles.values()), dtype=torch.float64)
        drawn = counts[torch.multinomial(weights, rows, replacement=True, generator=generator)]
        return (drawn * -(-vocabulary // self.tile) / self.tiles).round().clamp(min=1).long()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def histogram_of(counts: Tensor, source: str, vocabulary: int) -> Histogram:
    return Histogram(source, vocabulary, dict(sorted(Counter(counts.tolist()).items())))


def load_histogram(path: Path) -> Histogram:
    """
    Raises:
        ValueError: not a file that `python -m benchmarks rows` wrote, as `--histogram` or as `--out`.
    """
    try:
        histogram = _of_rows(path) if path.suffix == ".safetensors" else _of_json(path)
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no histogram ({error}); `python -m benchmarks tiles` and `rows` write them"
        ) from error
    if (histogram.tile, histogram.threshold) != (TILE, THRESHOLD) or not histogram.rows_by_live_tiles:
        raise ValueError(
            f"{path} counts tiles of {histogram.tile} above {histogram.threshold}; this needs {TILE} and "
            f"{THRESHOLD}, and at least one row"
        )
    return histogram


def _of_json(path: Path) -> Histogram:
    found = json.loads(path.read_text())
    found["rows_by_live_tiles"] = {int(k): int(n) for k, n in found["rows_by_live_tiles"].items()}
    return Histogram(**found)


def _of_rows(path: Path) -> Histogram:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about, counts = file.metadata() or {}, file.get_tensor("live_tiles")
    except SafetensorError as error:
        raise ValueError(error) from error
    found = histogram_of(counts, about["source"], int(about["vocabulary"]))
    return replace(found, tile=int(about["tile"]), threshold=float(about["threshold"]))


def live_tiles(hidden: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """(N,) int64: tiles with a probability above THRESHOLD.

    Args:
        hidden: (N, H).
        parts: the (V, H) weight in order, cut at multiples of TILE, as `weight_parts` does.
    """
    highest, sums = [], []
    for part in parts:
        logits = hidden.float() @ part.to(hidden.device).float().T
        highest.append(_tile_maxima(logits))
        sums.append(logits.logsumexp(1))
    return _above(torch.cat(highest, 1), torch.stack(sums).logsumexp(0))


def weight_parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(PART_ROWS)


def count_live(logits: Tensor) -> Tensor:
    """(n, V) float32 -> (n,) int64: tiles with a probability above THRESHOLD."""
    return _above(_tile_maxima(logits), logits.logsumexp(1))


def _above(highest: Tensor, logsumexp: Tensor) -> Tensor:
    return (highest > logsumexp[:, None] + math.log(THRESHOLD)).sum(1)


def _tile_maxima(logits: Tensor) -> Tensor:
    """(n, V) -> (n, tiles)."""
    whole = logits.new_full((logits.shape[0], -(-logits.shape[1] // TILE) * TILE), -math.inf)
    whole[:, : logits.shape[1]] = logits
    return whole.view(logits.shape[0], -1, TILE).amax(2)


def row_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Rows whose float32 logits fit a fixed memory."""
    size = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    return (slice(start, start + size) for start in range(0, hidden.shape[0], size))
