"""`python -m benchmarks tiles`: the live tiles of saved rows, with the head of a GGUF file.

It is dequantised part by part: a head of 151,936 x 1,536 takes 100 MB, where loading the model takes
gigabytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .live_tiles import PART_ROWS, THRESHOLD, histogram_of, live_tiles

_HEADS = ("output.weight", "token_embd.weight")  # a tied head has the second name alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="safetensors with `hidden`")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the model the rows are of")
    parser.add_argument("--source", required=True, help="the model and how its rows were made, in words")
    parser.add_argument("--limit", type=int, help="the first rows alone")
    parser.add_argument("--histogram", type=Path, required=True, metavar="OUT", help="JSON to write")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a file without what is needed, or rows that do not fit the head.
    """
    hidden = _hidden(options.rows)[: options.limit]
    vocabulary, width, parts = open_head(options.gguf)
    if hidden.shape[1] != width:
        raise ValueError(f"{options.rows} has rows of {hidden.shape[1]}, the head of {options.gguf} {width}")
    found = histogram_of(live_tiles(hidden, parts), options.source, vocabulary)
    found.save(options.histogram)
    print(f"{len(hidden)} rows: {found.density:.2%} of the tiles hold a probability above {THRESHOLD:g}")
    return 0


def open_head(path: Path) -> tuple[int, int, Iterator[Tensor]]:
    """V, H, and the head's rows in order, PART_ROWS at a time, dequantised to float32.

    Raises:
        ImportError: the gguf package is missing.
        ValueError: the file has no head.
    """
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    head = next((tensors[name] for name in _HEADS if name in tensors), None)
    if head is None:
        raise ValueError(f"{path} has neither {' nor '.join(_HEADS)}")
    width, vocabulary = (int(size) for size in head.shape)  # GGUF counts from the innermost

    def parts() -> Iterator[Tensor]:
        for start in range(0, vocabulary, PART_ROWS):
            rows = head.data[start : start + PART_ROWS]
            yield torch.from_numpy(dequantize(rows, head.tensor_type).reshape(-1, width))

    return vocabulary, width, parts()


def _hidden(path: Path) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor("hidden")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--rows {path} cannot be read: {error}") from error
