"""What each type of model does, each in a process of its own: a record, and a line of its table."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_fast.policy.architecture import own_logits
from grpo_fast.rollout import Completion

from .machine import environment
from .measure import Failure, in_a_process
from .record import write_json
from .tables import DASH, console
from .tiny import kinds

CPU = torch.device("cpu")
Row = dict[str, Any]
"""As the record has it: `kind`, what stands in each column, and `reasons` by column why there is nothing."""
Measures = Callable[[], dict[str, Any]]
"""Measures some columns."""


@dataclass(frozen=True)
class TypeTable:
    """The columns of one record of `results`, whose file is named as its list of rows is."""

    name: str
    heads: Mapping[str, str]  # by column
    limits: Mapping[str, float]  # of columns of errors: rounding does not explain what is beyond
    seconds: float  # that one type may take
    words: Mapping[str, str] = field(default_factory=dict)  # of values

    @property
    def path(self) -> Path:
        return Path(__file__).resolve().parent / "results" / f"{self.name}.json"

    def recorded(self) -> dict[str, Row]:
        """The rows of the checked-in record, by type."""
        return {row["kind"]: row for row in json.loads(self.path.read_text(encoding="utf-8"))[self.name]}

    def row(self, kind: str) -> Row:
        """Of a type of which nothing is known."""
        return {"kind": kind, **dict.fromkeys(self.heads), "reasons": {}}

    def wrong(self, row: Row) -> list[str]:
        """The columns with errors that rounding does not explain."""
        return [
            name for name, limit in self.limits.items() if row[name] is not None and not row[name] <= limit
        ]

    def cells(self, row: Row) -> list[str]:
        """One line of the table; errors that are wrong are bold."""
        told: dict[str, list[str]] = {}
        for column, why in row["reasons"].items():
            told.setdefault(why, []).append(column)
        reasons = "; ".join(f"{', '.join(columns)}: {why}" for why, columns in told.items())
        return [row["kind"], *(self._text(row, column) for column in self.heads), reasons.replace("|", "\\|")]

    def _text(self, row: Row, column: str) -> str:
        value = row[column]
        if column not in self.limits and isinstance(value, float):
            return f"{value:.1f}"
        if isinstance(value, float):
            return f"**{value:.0e}**" if column in self.wrong(row) else f"{value:.0e}"
        return {None: DASH, True: "yes", False: "no", **self.words}.get(value, value)

    def shown(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        """Heads and lines."""
        return ["type", *self.heads.values(), "reasons"], [self.cells(row) for row in rows]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", metavar="TYPE", help="these types (all)")
        parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (%(default)s)")
        parser.add_argument(
            "--record", action="store_true", help=f"write {self.path.name} of benchmarks/results"
        )

    def measure(
        self, check: Callable[[str, int], Row], every: Sequence[str], asked: argparse.Namespace, **about: Any
    ) -> list[Row]:
        """The rows of the types asked for, printed as they come; `--record` replaces those of the record.

        Raises:
            ValueError: a type that transformers does not have.
        """
        if unknown := {*(asked.only or ())} - {*kinds()}:
            raise ValueError(f"--only {min(unknown)}: transformers has no language model of this type")
        screen, found = console(), dict[str, Row]()
        for kind in asked.only or every:
            try:
                row, _ = in_a_process(CPU, check, kind, asked.seed, seconds=self.seconds)
            except Failure as failure:
                row = self.row(kind) | {"reasons": {"process": failure.args[1]}}
            found[kind] = row
            line = "  ".join(cell for cell in self.cells(row) if cell != DASH)
            screen.print(line, markup=False, soft_wrap=True)
        if asked.record:
            rows = self.recorded() | found
            document = {self.name: [rows[kind] for kind in every if kind in rows]} | about
            write_json(self.path, document | {"environment": environment(CPU)})
            screen.print("`python -m benchmarks readme` writes it into docs/", markup=False)
        return [*found.values()]


def fill(row: Row, parts: Mapping[str, Measures]) -> Row:
    """The row with what its parts measure, or why one of them cannot, in its own words."""
    for column, part in parts.items():
        try:
            row = row | part()
        except Exception as error:
            row = row | {"reasons": row["reasons"] | {column: words(error)}}
    return row


def words(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""  # of an assertion
    return kind + " ".join(said.split())[:400]


def own_logprobs(own: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """(N,) of the sequence alone, by the model's own forward."""
    alone = own_logits(own, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
    return alone.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def furthest(own: Any, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]) -> float:
    """Nats of the token whose log-probability an engine tells most unlike the model's own forward."""
    differences = [
        own_logprobs(own, prompt, completion.token_ids) - torch.tensor(completion.logprobs)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    return float(torch.cat(differences).abs().max())
