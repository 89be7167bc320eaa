"""How many vocabulary tiles of a row matter: counting them, and histograms of the counts.

`python -m benchmarks tiles` counts those of saved rows, with the head of a GGUF file. It is dequantised part
by part: a head of 151,936 x 1,536 takes 100 MB, where loading the model takes gigabytes.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn.functional import pad

from .record import write_json

TILE = 128
HISTOGRAM = Path(__file__).parent / "results" / "live_tiles_qwen2.5_coder_1.5b.json"
"""The checked-in one, in a checkout."""
THRESHOLD = 1e-5  # a tile is live when one of its probabilities is larger
PART_ROWS = 64 * TILE  # of a head that is read, or multiplied by, in parts
_GGUF_HEADS = ("output.weight", "token_embd.weight")  # a tied head has the second name alone


@dataclass(frozen=True)
class Histogram:
    """Rows by their number of live tiles, and where they come from."""

    source: str  # the model and how its rows were sampled
    vocabulary: int
    rows_by_live_tiles: dict[int, int]
    tile: int = TILE
    threshold: float = THRESHOLD

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


_JSON = TypeAdapter(Histogram)


def histogram_of(counts: Tensor, source: str, vocabulary: int) -> Histogram:
    return Histogram(source, vocabulary, dict(sorted(Counter(counts.tolist()).items())))


def load_histogram(path: Path) -> Histogram:
    """
    Raises:
        ValueError: not a file that `python -m benchmarks rows` wrote, as `--histogram` or as `--out`.
    """
    try:
        if path.suffix == ".safetensors":
            tensors, about = load_tensors(path)
            found = histogram_of(tensors["live_tiles"], about["source"], int(about["vocabulary"]))
            found = replace(found, tile=int(about["tile"]), threshold=float(about["threshold"]))
        else:
            found = _JSON.validate_json(path.read_bytes())
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is no histogram ({error}); `python -m benchmarks tiles` and `rows` write them"
        ) from error
    if (found.tile, found.threshold) != (TILE, THRESHOLD) or not found.rows_by_live_tiles:
        raise ValueError(
            f"{path} counts tiles of {found.tile} above {found.threshold}; this needs {TILE} and "
            f"{THRESHOLD}, and at least one row"
        )
    return found


def given_histogram(path: Path | None, device: torch.device) -> Histogram | None:
    """The one asked for; on a GPU the checked-in one, where there is a checkout."""
    if path is None and device.type == "cuda" and HISTOGRAM.is_file():
        path = HISTOGRAM
    return None if path is None else load_histogram(path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A safetensors file's tensors, on the CPU, and what it says about itself.

    Raises:
        ValueError: no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def live_tiles(hidden: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """(N,) int64: tiles with a probability above THRESHOLD.

    Args:
        hidden: (N, H).
        parts: the (V, H) weight in order, cut at multiples of TILE.
    """
    highest, sums = [], []
    for part in parts:
        logits = hidden.float() @ part.to(hidden.device).float().T
        highest.append(_tile_maxima(logits))
        sums.append(logits.logsumexp(1))
    return _above(torch.cat(highest, 1), torch.stack(sums).logsumexp(0))


def count_live(logits: Tensor) -> Tensor:
    """(n, V) float32 -> (n,) int64: tiles with a probability above THRESHOLD."""
    return _above(_tile_maxima(logits), logits.logsumexp(1))


def _above(highest: Tensor, logsumexp: Tensor) -> Tensor:
    return (highest > logsumexp[:, None] + math.log(THRESHOLD)).sum(1)


def _tile_maxima(logits: Tensor) -> Tensor:
    """(n, V) -> (n, tiles)."""
    return pad(logits, (0, -logits.shape[1] % TILE), value=-math.inf).view(len(logits), -1, TILE).amax(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="safetensors with `hidden`")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the model the rows are of")
    parser.add_argument("--source", required=True, help="the model and how its rows were made, in words")
    parser.add_argument("--limit", type=int, help="the first rows alone")
    parser.add_argument("--histogram", type=Path, required=True, metavar="OUT", help="JSON to write")


def main(options: argparse.Namespace) -> int:
    from gguf import GGUFReader, dequantize

    tensors, _ = load_tensors(options.rows)
    if "hidden" not in tensors:
        raise ValueError(f"{options.rows} holds {sorted(tensors)} but no hidden")
    hidden = tensors["hidden"][: options.limit]
    of_model = {tensor.name: tensor for tensor in GGUFReader(options.gguf).tensors}
    head = next((of_model[name] for name in _GGUF_HEADS if name in of_model), None)
    if head is None:
        raise ValueError(f"{options.gguf} has neither {' nor '.join(_GGUF_HEADS)}")
    width, vocabulary = (int(size) for size in head.shape)  # GGUF counts from the innermost
    if hidden.shape[1] != width:
        raise ValueError(f"{options.rows} has rows of {hidden.shape[1]}, the head of {options.gguf} {width}")
    places = (slice(start, start + PART_ROWS) for start in range(0, vocabulary, PART_ROWS))
    parts = (torch.from_numpy(dequantize(head.data[p], head.tensor_type)).view(-1, width) for p in places)
    found = histogram_of(live_tiles(hidden, parts), options.source, vocabulary)
    write_json(options.histogram, found)
    print(f"{len(hidden)} rows: {found.density:.2%} of the tiles hold a probability above {THRESHOLD:g}")
    return 0
