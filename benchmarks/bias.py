"""Errors of a backward that draws, drops or filters, beside that of rounding the logit gradient to bfloat16.

Of dX, dW, and a weight behind the head: dX's product with the hidden states and one constant as features. It
sums over tokens, and so shows what is always left out on the same side. Float32, on a CPU; errors are
relative to the exact gradient, root mean squares over batches. Targets are drawn by the model, one completion
in 8 is right.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from grpo_fast.kernels import TILE
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.head.call import HeadCall, LogitGradient, RowGradients, RowStatistics
from grpo_fast.head.plan import DEFAULT_TOLERANCE

from .live_tiles import HISTOGRAM, load_histogram
from .machine import environment
from .problem import Setting
from .record import write_json
from .rows import RealRows, describe, load_real_rows, make_problem

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "head"))  # where the oracle of the draws is
from selection import Selection, choose, salt_of, within_tolerance

GROUP, BLOCK = 8, 128
FILTER = torch.finfo(torch.bfloat16).eps / 32
"""Cut Cross Entropy's: it leaves out 128 x 128 blocks whose every |softmax - one hot| is smaller, of the
vocabulary sorted by the batch's mean logit."""
SEQUENCE, TOKEN = "sequence", "token"
ROUNDED, DRAWN, DROPPED, FILTERED = "rounded to bfloat16", "drawn", "dropped", "Cut Cross Entropy's filter"
ERRORS = "hidden", "weight", "behind"
NUMBERS = (*ERRORS, "density", "entries", "hidden_certificate", "weight_certificate")
TOLERANCES = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)
LENGTHS = ("400,7600", "1,15999")
_CHUNK_BYTES = 128 << 20
Variant = dict[str, Any]
Pairs = tuple[Tensor, slice, Tensor]  # of a tile: rows (b,), columns, what goes into dW (b, w)


class Batch(NamedTuple):
    """N tokens of a model's rows, and the gradient that GRPO sends into their log-probabilities."""

    problem: HeadCall
    rows: LogitGradient
    tile_lse: Tensor  # (N, T)

    @classmethod
    def draw(cls, source: RealRows, lengths: Sequence[int], mean: str, seed: int) -> Batch:
        """Each row once where there are enough, else with replacement; its target from its softmax.

        Args:
            lengths: of completions, of which every eighth is right.
            mean: SEQUENCE or TOKEN.
        """
        count, rows, chance = sum(lengths), len(source.hidden), torch.Generator().manual_seed(seed)
        place = torch.randperm(rows, generator=chance)[:count]
        if count > rows:
            place = torch.randint(rows, (count,), generator=chance)
        hidden, weight = source.hidden[place], source.weight
        targets, logprob, tile_lse = torch.empty_like(place), torch.empty(count), []
        for part in chunks(count, len(weight)):
            z = hidden[part] @ weight.T
            tiles = pad(z, (0, -z.shape[1] % TILE), value=-math.inf).unflatten(1, (-1, TILE))
            tile_lse.append(tiles.logsumexp(2))
            logp = z.log_softmax(1)
            sampled = torch.multinomial(logp.exp(), 1, generator=chance)
            targets[part], logprob[part] = sampled[:, 0], logp.gather(1, sampled)[:, 0]
        right = math.sqrt(GROUP - 1)  # (1 - 1/8) over the standard deviation
        advantage = torch.where(torch.arange(len(lengths)) % GROUP == 0, right, -1 / right)
        length = torch.tensor(lengths)
        upstream = -advantage / (length * len(lengths) if mean == SEQUENCE else count)
        problem, of_tiles = HeadCall(hidden, weight, targets), torch.cat(tile_lse)
        statistics = RowStatistics(logprob, of_tiles.logsumexp(1), *5 * [torch.empty(0)])
        gradients = RowGradients(upstream.repeat_interleave(length))
        return cls(problem, LogitGradient.of(problem, statistics, gradients), of_tiles)

    @property
    def salt(self) -> Tensor:
        return salt_of(self.rows.logsumexp, self.problem.targets)

    def behind(self, hidden: Tensor) -> Tensor:
        """(H + 1, H)"""
        return pad(self.problem.hidden, (0, 1), value=1.0).T @ hidden


class Exact(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    squares: Tensor  # (3,) of it and of the weight behind the head
    rounded: Tensor  # (3,) relative squares of rounding's error


def exactly(batch: Batch) -> Exact:
    problem = batch.problem
    hidden, error = torch.zeros_like(problem.hidden), torch.zeros_like(problem.hidden)
    weight, of_weight = torch.empty_like(problem.weight), torch.zeros(())  # the square of rounding's error
    for columns in chunks(problem.vocabulary, len(hidden)):
        gradient = batch.rows.of_products(problem, columns)
        of_rounding = gradient.bfloat16().float() - gradient
        hidden.addmm_(gradient, problem.weight[columns])
        error.addmm_(of_rounding, problem.weight[columns])
        weight[columns] = gradient.T @ problem.hidden
        of_weight = of_weight + square(of_rounding.T @ problem.hidden)
    squares = torch.stack([square(hidden), square(weight), square(batch.behind(hidden))])
    of_rounding = torch.stack([square(error), of_weight, square(batch.behind(error))])
    return Exact(hidden, weight, squares, of_rounding / squares)


def square(tensor: Tensor) -> Tensor:
    return tensor.norm().square()


def drawn(batch: Batch, tolerance: float, salt: Tensor) -> tuple[Selection, list[Pairs]]:
    """As the head draws."""
    numbers = torch.arange(len(batch.tile_lse))
    selection = choose(batch.problem, batch.rows, numbers, salt, tolerance, batch.tile_lse)
    sums = torch.zeros_like(selection.entry)
    pairs = list(kept_pairs(batch.problem, batch.rows, selection))
    for part, columns, gradient in pairs:
        row, column = selection.small_entries(gradient, part, columns)
        sums[:, 0].index_add_(0, part[row], gradient[row, column].abs())
    return within_tolerance(selection, batch.problem, batch.rows, sums, tolerance), pairs


def dropped(batch: Batch, selection: Selection) -> tuple[Selection, Iterator[Pairs]]:
    """The same threshold without chance: what is smaller is left out, and of the rest every entry kept."""
    scale, entry = (selection.scale == 1).float(), torch.zeros_like(selection.entry)
    selection = replace(selection, scale=scale, entry=entry)
    return selection, kept_pairs(batch.problem, batch.rows, selection)


def filtered(batch: Batch) -> tuple[Selection, Iterator[Pairs], Tensor]:
    """Cut Cross Entropy's, of the vocabulary in its order, and that order."""
    problem = batch.problem
    words = (problem.weight @ problem.hidden.mean(0)).argsort()
    place = torch.empty_like(words).scatter_(0, words, torch.arange(len(words)))
    problem = problem._replace(weight=problem.weight[words], targets=place[problem.targets])
    rows, blocks = len(problem.hidden), []
    for columns in chunks(problem.vocabulary, rows):
        size = (problem.logits(columns) - batch.rows.logsumexp[:, None]).exp_()
        size[problem.targets_within(columns)] -= 1
        whole = pad(size.abs_(), (0, -size.shape[1] % TILE, 0, -rows % BLOCK))
        blocks.append(whole.unflatten(1, (-1, TILE)).unflatten(0, (-1, BLOCK)).amax((1, 3)) >= FILTER)
    scale = torch.cat(blocks, 1).repeat_interleave(BLOCK, 0)[:rows].float()
    zero = torch.zeros(())
    selection = Selection(problem.targets, scale, scale.new_zeros(rows, 1), zero + 1, place, zero, zero)
    return selection, kept_pairs(problem, batch.rows, selection), words


def kept_pairs(problem: HeadCall, rows: LogitGradient, selection: Selection) -> Iterator[Pairs]:
    tile, row = selection.scale.T.nonzero(as_tuple=True)
    for t, part in enumerate(row.split(tile.bincount(minlength=selection.scale.shape[1]).tolist())):
        columns = slice(t * TILE, min((t + 1) * TILE, problem.vocabulary))
        gradient = rows.rows(part).of_products(problem.rows(part), columns)
        yield part, columns, selection.of_pairs(gradient, part, columns)


def compare(
    batch: Batch,
    exact: Exact,
    selection: Selection,
    pairs: Iterable[Pairs],
    words: Tensor | None = None,
    sums: Sequence[Tensor] = (),
) -> Tensor:
    """NUMBERS of a selection, of the errors their squares; the errors themselves are added to `sums`."""
    hidden, of_weight, small, entries = -exact.hidden, torch.zeros(()), torch.zeros(()), 0
    chance = bool(selection.entry.any())
    for part, columns, gradient in pairs:
        place = columns if words is None else words[columns]
        error = gradient.T @ batch.problem.hidden[part] - exact.weight[place]
        of_weight = of_weight + square(error)
        of_hidden, more = selection.of_hidden(gradient, part, columns) if chance else (gradient, 0)
        hidden.index_add_(0, part, of_hidden @ batch.problem.weight[place])
        entries, small = entries + int(of_hidden.count_nonzero()), small + more
        if sums:
            sums[1][place] += error
    errors = hidden, of_weight, batch.behind(hidden)
    for total, error in zip(sums[::2], errors[::2], strict=False):
        total += error
    density, *certificates = selection.metrics(small, selection.scale.numel())[:3].tolist()
    squares = torch.stack([square(errors[0]), of_weight, square(errors[2])]) / exact.squares
    return torch.tensor([*squares.tolist(), density, entries / len(hidden), *certificates])


def measure(
    source: RealRows, lengths: Sequence[int], mean: str, tolerances: Sequence[float], batches: int
) -> list[Variant]:
    """One cell for rounding, one for the filter, and two for every tolerance."""
    found = defaultdict(list)
    for seed in range(batches):
        batch = Batch.draw(source, lengths, mean, seed)
        exact = exactly(batch)
        found[ROUNDED, None].append(exact.rounded)
        found[FILTERED, None].append(compare(batch, exact, *filtered(batch))[:5])
        for tolerance in tolerances:
            selection, pairs = drawn(batch, tolerance, batch.salt)
            found[DRAWN, tolerance].append(compare(batch, exact, selection, pairs))
            found[DROPPED, tolerance].append(compare(batch, exact, *dropped(batch, selection))[:5])
    shown = sorted(set(lengths)) if len(lengths) > 2 else list(lengths)
    shape = {"tokens": sum(lengths), "lengths": shown, "mean": mean, "batches": batches}
    cells = []
    for (variant, tolerance), of_batches in found.items():
        numbers = torch.stack(of_batches).mean(0)
        numbers[:3].sqrt_()
        named = dict(zip(NUMBERS, numbers.tolist(), strict=False))
        cells.append(shape | {"variant": variant, "tolerance": tolerance} | named)
    return cells


def mean_of_draws(source: RealRows, tokens: int, tolerance: float, draws: int) -> dict[str, Any]:
    """Of one batch n·|mean error|² / mean |error|² over n draws: 1 where they are unbiased, give or take the
    `spread` that it has over tenths of the draws.
    """
    batch = Batch.draw(source, equal_lengths(tokens), SEQUENCE, seed=0)
    exact = exactly(batch)
    shapes = exact.hidden, exact.weight, batch.behind(exact.hidden)
    total, part = ([torch.zeros_like(of) for of in shapes] for _ in range(2))
    squares, ratios, each = torch.zeros(3), [], draws // 10
    for tenth in range(10):
        salts = batch.salt + 1 + each * tenth + torch.arange(each)
        of_part = sum(compare(batch, exact, *drawn(batch, tolerance, salt), sums=part)[:3] for salt in salts)
        ratios.append(torch.stack([square(of) for of in part]) / exact.squares / of_part)
        squares = squares + of_part
        for sums, of in zip(total, part, strict=True):
            sums += of
            of.zero_()
    ratio = torch.stack([square(of) for of in total]) / exact.squares / squares
    by_name = {
        name: dict(zip(ERRORS, of.tolist(), strict=True))
        for name, of in (("ratio", ratio), ("spread", torch.stack(ratios).std(0)))
    }
    return {"tokens": tokens, "tolerance": tolerance, "draws": 10 * each} | by_name


def equal_lengths(tokens: int) -> list[int]:
    """Of whole groups, some 128 tokens a completion."""
    fitting = [count for count in range(GROUP, tokens // 128 + 1, GROUP) if tokens % count == 0]
    count = max(fitting, default=GROUP)
    return [tokens // count + (i < tokens % count) for i in range(count)]


def chunks(rows: int, width: int) -> list[slice]:
    """Of rows so wide, or of columns so high."""
    step = max(TILE, _CHUNK_BYTES // 4 // max(width, 1) // TILE * TILE)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def made_rows() -> RealRows:
    histogram = load_histogram(HISTOGRAM)
    setting = Setting("histogram", 512, 256, 32_000, "forward", False, "bfloat16")
    problem = make_problem(setting, torch.device("cpu"), 0, histogram)
    return RealRows(describe(setting, histogram), problem.hidden, problem.targets, problem.weight)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=Path, nargs="+", metavar="FILE", help="of `rows`; made if not given")
    parser.add_argument("--tokens", type=int, nargs="+", default=[284, 1136, 4544, 9088, 16384, 32768])
    parser.add_argument("--tolerance", type=float, nargs="*", default=TOLERANCES, help="besides the default")
    parser.add_argument(
        "--sweep", type=int, default=4544, help="most tokens for more than the default (4544)"
    )
    parser.add_argument("--lengths", nargs="*", default=LENGTHS, help="of two completions, the first right")
    batches = [8, 4, 2, 2, 2, 1, 2]
    parser.add_argument(
        "--batches", type=int, nargs="+", default=batches, help="of each of --tokens, then of --lengths"
    )
    parser.add_argument("--draws", type=int, default=200, help="of one batch of the fewest tokens (200)")
    parser.add_argument("--json", type=Path, help="write everything here")


@torch.no_grad()
def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: not as many batches as sizes.
    """
    found: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "default": DEFAULT_TOLERANCE,
        "bias": [],
    }
    *of_tokens, of_lengths = options.batches
    if len(of_tokens) != len(options.tokens):
        raise ValueError(
            f"--batches has {len(options.batches)} numbers: give one for each of the {len(options.tokens)} "
            "--tokens, and a last one for --lengths"
        )
    equal = zip(options.tokens, of_tokens, strict=True)
    cases = [(equal_lengths(tokens), SEQUENCE, batches) for tokens, batches in equal]
    for words in options.lengths:
        cases += [([int(word) for word in words.split(",")], mean, of_lengths) for mean in (SEQUENCE, TOKEN)]
    for source in map(load_real_rows, options.rows) if options.rows else [made_rows()]:
        rows = replace(source, hidden=source.hidden.float(), weight=source.weight.float())
        of_model: dict[str, Any] = {"rows": rows.name, "vocabulary": len(rows.weight), "cells": []}
        found["bias"].append(of_model)
        del source
        for lengths, mean, batches in cases:
            swept = sum(lengths) <= options.sweep and len(lengths) > 2
            tolerances = sorted({DEFAULT_TOLERANCE, *(options.tolerance if swept else ())})
            of_model["cells"] += (cells := measure(rows, lengths, mean, tolerances, batches))
            say(cells)
            write_json(options.json, found)
        of_model["draws"] = mean_of_draws(rows, min(options.tokens), DEFAULT_TOLERANCE, options.draws)
        print(of_model["draws"], flush=True)
        write_json(options.json, found)
    return 0


def say(cells: Sequence[Variant]) -> None:
    """Errors in units of rounding's, too."""
    rounded = cells[0]
    print(f"{rounded['tokens']:,} tokens, {rounded['mean']} mean, lengths {rounded['lengths']}")
    for cell in cells:
        name = cell["variant"] + ("" if cell["tolerance"] is None else f" {cell['tolerance']:g}")
        errors = "  ".join(f"{n} {cell[n]:.1e} ({cell[n] / rounded[n]:.2f})" for n in ERRORS)
        kept = f"{cell['density']:.2%}, {cell['entries']:.0f} entries a row" if "density" in cell else ""
        print(f"  {name:<28} {errors}  {kept}", flush=True)
