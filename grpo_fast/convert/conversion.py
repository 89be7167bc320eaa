"""What a conversion gives: our configuration, and for each foreign key what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from grpo_fast.convert.names import Absent, Places, Rule, translate
from grpo_fast.objective.catalog import CATALOG
from grpo_fast.section import short

FILL_IN = "FILL_IN"
REQUIRED = {"model.path": FILL_IN, "dataset.source": FILL_IN, "rewards": [{"reward": FILL_IN}]}
# Sections that only training on the policy's own completions reads.
SAMPLING = frozenset({"rewards", "rollout", "advantage", "loss", "num_iterations", "minibatches"})
_LOSS_SPECIFIC = frozenset().union(*(facts.fields for facts in CATALOG.values()))

Outcome = Literal["taken", "renamed", "written for a default", "not applicable"]


@dataclass(frozen=True)
class Row:
    """One foreign key."""

    key: str  # dotted, as in the source
    value: Any
    outcome: Outcome
    places: tuple[str, ...] = ()  # ours that it set
    reason: str = ""

    def __str__(self) -> str:
        secret = isinstance(self.value, str) and self.key.endswith(("hub_token", "api_key"))
        return f"{self.key} = {'(hidden)' if secret else short(self.value)}"


@dataclass(frozen=True)
class Conversion:
    """Our configuration and its account."""

    source: str  # "Axolotl", "TRL" or "NeMo-RL"
    places: Mapping[str, Any]  # dotted name -> value
    rows: tuple[Row, ...]
    fill_in: tuple[str, ...]  # places that the source says nothing of, for a person to set

    def heading(self) -> str:
        """Comment lines for the top of the YAML file."""
        missing = f"# To fill in: {', '.join(self.fill_in)}.\n" if self.fill_in else ""
        return f"# Converted from {self.source}.\n{missing}"

    def listing(self) -> str:
        """Each key with what became of it, those without a place together under their reason."""
        lines = []
        for row in self.rows:
            if row.outcome != "not applicable":
                target = f" -> {', '.join(row.places)}" if row.places and row.places != (row.key,) else ""
                note = f" ({row.reason})" if row.reason else ""
                lines.append(f"{row.outcome}: {row}{target}{note}")
        by_reason = attrgetter("reason")
        left = sorted((row for row in self.rows if row.outcome == "not applicable"), key=by_reason)
        for reason, rows in groupby(left, key=by_reason):
            lines += [f"not applicable: {reason}", *(f"  {row}" for row in rows)]
        if self.fill_in:
            lines.append(f"to fill in, for the file does not say: {', '.join(self.fill_in)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Entry:
    """A foreign key to convert."""

    key: str  # dotted, as in the source
    value: Any
    rule: Rule | None  # None for a key that the converter does not know
    note: str = ""  # how the value is put in our terms


@dataclass(frozen=True)
class ForeignConfig:
    """A foreign configuration, each key with its rule."""

    source: str
    preference: bool  # trains on fixed pairs instead of the policy's own completions
    entries: Sequence[Entry]
    siblings: Mapping[str, Any]  # all keys by the names that the rules know
    defaults: Sequence[Entry] = ()  # what missing keys mean there, where ours would mean something else


@dataclass
class _Account:
    """A conversion under way."""

    preference: bool
    places: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    set_by: dict[str, str] = field(default_factory=dict)  # place -> the key that set it

    def take(self, entry: Entry, siblings: Mapping[str, Any]) -> None:
        """Set the places of a key, unless another key has set them or the run would not read them."""
        try:
            places = self._places(entry, siblings)
        except (ValueError, TypeError) as error:
            self.rows.append(Row(entry.key, entry.value, "not applicable", reason=str(error)))
            return
        reason = entry.note if places else "it is so here anyway"
        self._set(entry, places, "renamed" if any(p != entry.key for p in places) else "taken", reason)

    def take_default(self, entry: Entry, siblings: Mapping[str, Any]) -> None:
        """Write down what a missing key means, unless another key has set its place."""
        try:
            places = self._places(entry, siblings)
        except ValueError:
            return
        if places and not places.keys() & self.places.keys():
            self._set(entry, places, "written for a default", entry.note)

    def _set(self, entry: Entry, places: Places, outcome: Outcome, reason: str) -> None:
        self.places.update(places)
        self.set_by.update(dict.fromkeys(places, entry.key))
        self.rows.append(Row(entry.key, entry.value, outcome, tuple(places), reason))

    def _places(self, entry: Entry, siblings: Mapping[str, Any]) -> Places:
        """Raises ValueError with the reason why the key has no place."""
        if entry.rule is None:
            raise ValueError("is not a key that this converter knows")
        if isinstance(entry.rule, Absent):
            raise ValueError(entry.rule.reason)
        places = translate(entry.rule, entry.value, siblings)
        for place, value in places.items():
            if place in self.places and self.places[place] != value:
                raise ValueError(f"{place} is {short(self.places[place])} by {self.set_by[place]}")
            self._check_read(place, value)
        return places

    def _check_read(self, place: str, value: Any) -> None:
        """Raises ValueError where the place would be refused beside the algorithm and the loss."""
        section, _, name = place.rpartition(".")
        if self.preference:
            if place.partition(".")[0] in SAMPLING:
                raise ValueError("training on fixed completions does not read it")
            return
        facts = CATALOG.get(self.places.get("loss.loss_type", "dapo"))
        if section != "loss" or facts is None:
            return
        unread = name in _LOSS_SPECIFIC and name not in facts.fields
        if name == "importance_sampling_level":
            unread = value not in facts.choosable_levels
        if unread:
            raise ValueError(f"the loss that is chosen does not read loss.{name}")


def convert_config(foreign: ForeignConfig) -> Conversion:
    """Our configuration from a foreign one; every key is in the account."""
    account = _Account(foreign.preference)
    if foreign.preference:
        account.places["algorithm"] = "dpo"
        account.set_by["algorithm"] = "the kind of file"
    # The loss first: which of its terms are read depends on it.
    for entry in sorted(foreign.entries, key=lambda entry: "loss_type" not in entry.key):
        account.take(entry, foreign.siblings)
    for entry in foreign.defaults:
        account.take_default(entry, {**foreign.siblings, entry.key: entry.value})
    required = [p for p in REQUIRED if not (foreign.preference and p in SAMPLING)]
    missing = [place for place in required if place not in account.places]
    places = {**{place: REQUIRED[place] for place in missing}, **account.places}
    if "max_steps" not in places:  # the source counts epochs; ours has a default that nobody chose
        missing.append("max_steps")
    return Conversion(foreign.source, places, tuple(account.rows), tuple(missing))
