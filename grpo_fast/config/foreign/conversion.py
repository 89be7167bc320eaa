"""Conversions: our configuration, and the outcome of each foreign key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from grpo_fast.config.foreign.rules import NOTHING, Absent, NotApplicable, Places, Rule, translate
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import short
from grpo_fast.objective.catalog import CATALOG, loss_specific

FILL_IN = "FILL_IN"
REQUIRED = {"model.path": FILL_IN, "dataset.source": FILL_IN, "rewards": [{"reward": FILL_IN}]}
# Sections that only `algorithm: grpo` reads.
SAMPLING = frozenset({"rewards", "rollout", "advantage", "loss", "num_iterations", "minibatches"})

Algorithm = Literal["grpo", "dpo", "rank"]
Outcome = Literal[
    "taken", "renamed", "written for a default", "decided", "not applicable", "needs a decision"
]
LEFT_OUT: Outcome = "not applicable"
TO_DECIDE: Outcome = "needs a decision"
UNKNOWN = "is not a key that this converter knows"


@dataclass(frozen=True)
class Entry:
    """A foreign key to convert."""

    key: str  # dotted, as in the source
    value: Any
    rule: Rule | None  # None for a key that the converter does not know
    note: str = ""  # how the value was translated
    missing: bool = False  # the value is the source's default of a missing key


@dataclass(frozen=True)
class ForeignKey:
    """A foreign key and its outcome."""

    key: str
    value: Any
    outcome: Outcome
    places: tuple[str, ...] = ()  # our keys that it set
    reason: str = ""
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {short(masked(self.value, self.key))}"


@dataclass(frozen=True)
class Conversion:
    """Our configuration, and the outcome of each foreign key."""

    source: str  # "Axolotl", "TRL", "NeMo-RL" or a script's name
    given: Places  # what the source sets
    rows: tuple[ForeignKey, ...]
    files: Mapping[str, str] = field(default_factory=dict)  # text by path, that the configuration names

    @property
    def fill_in(self) -> tuple[str, ...]:
        """Required keys that the source does not set."""
        preference = self.given.get("algorithm") in ("dpo", "rank")
        required = [place for place in REQUIRED if not (preference and place in SAMPLING)]
        length = [] if "epochs" in self.given else ["max_steps"]  # our default is nobody's choice
        return tuple(place for place in (*required, *length) if place not in self.given)

    @property
    def places(self) -> Places:
        """Our keys and their values; FILL_IN in those to fill in."""
        return {place: REQUIRED.get(place, FILL_IN) for place in self.fill_in} | self.given

    @property
    def open(self) -> tuple[str, ...]:
        """The keys, theirs and ours, that the user must decide before the run is the same experiment."""
        undecided = (row.key for row in self.rows if row.outcome == TO_DECIDE)
        return tuple(dict.fromkeys([*undecided, *self.fill_in]))

    def without(self, refused: Mapping[str, str]) -> Conversion:
        """Leave out the places that are refused, each for a reason."""
        rows = [*self.rows]
        for index, row in enumerate(rows):
            if reasons := dict.fromkeys(refused[place] for place in row.places if place in refused):
                rows[index] = replace(row, outcome=TO_DECIDE, places=(), reason="; ".join(reasons))
        given = {place: value for place, value in self.given.items() if place not in refused}
        return replace(self, given=given, rows=tuple(rows))

    def decided(self, key: str, by: str) -> Conversion:
        """Mark a key that is decided by another key of ours."""
        changes: Any = {"outcome": "decided", "places": (), "reason": f"by {by}"}
        return replace(self, rows=tuple(replace(r, **changes) if r.key == key else r for r in self.rows))

    def heading(self) -> str:
        """Return comment lines for the top of the YAML file."""
        lines = [f"Converted from {self.source}."]
        lines += [f"Needs a decision: {row}: {row.reason}" for row in self.rows if row.outcome == TO_DECIDE]
        lines += [f"To fill in: {', '.join(self.fill_in)}."] if self.fill_in else []
        return "".join(f"# {' '.join(line.split())}\n" for line in lines)

    def listing(self, *, whole: bool = True, settled: bool = False) -> str:
        """List each key with its outcome; keys without a place are grouped by their reason.

        Args:
            whole: include defaults, and keys that are taken as they are.
            settled: overrides set what the file leaves open.
        """
        lines = [f"converted from {self.source}:"]
        unlisted = (LEFT_OUT, TO_DECIDE, *(() if whole else ("taken", "written for a default")))
        for row in (row for row in self.rows if row.outcome not in unlisted):
            target = f" -> {', '.join(row.places)}" if row.places and row.places != (row.key,) else ""
            lines.append(f"{row.outcome}: {row}{target}" + (f" ({row.reason})" if row.reason else ""))
        by_reason = attrgetter("reason")
        for outcome in (LEFT_OUT, TO_DECIDE):
            left = sorted((row for row in self.rows if row.outcome == outcome), key=by_reason)
            for reason, rows in groupby(left, key=by_reason):
                lines += [f"{outcome}: {reason}", *(f"  {row}" for row in rows)]
        if self.fill_in and not settled:
            lines.append(f"to fill in, for the file does not say: {', '.join(self.fill_in)}")
        if self.open and not settled:
            lines.append(f"not the same experiment before these are decided: {', '.join(self.open)}")
        return "\n".join(lines)


def convert_entries(
    source: str,
    entries: Sequence[Entry],
    siblings: Mapping[str, Any],
    rules: Mapping[str, Rule],
    defaults: Mapping[str, Any],
    *,
    algorithm: Algorithm,
) -> Conversion:
    """Convert foreign keys.

    Args:
        siblings: all values by the names that the rules know.
        defaults: values of missing keys there, where our default differs.
    """
    preference = algorithm != "grpo"
    note = f"{source}'s default"
    missing = [key for key in defaults if siblings.get(key) is None]
    entries = [*entries, *(Entry(key, defaults[key], rules[key], note, missing=True) for key in missing)]
    places: Places = {"algorithm": algorithm} if preference else {}
    set_by = dict.fromkeys(places, "the file's kind")
    rows: list[ForeignKey] = []
    # The loss first, since it decides which of its constants are read.
    for entry in sorted(entries, key=lambda entry: "loss_type" not in entry.key):
        try:
            found = _translated(entry, {**siblings, entry.key: entry.value} if entry.missing else siblings)
            if entry.missing and (not found or found.keys() & places.keys()):
                continue
            for place, value in found.items():
                if places.get(place, value) != value:
                    raise ValueError(f"{place} is {short(places[place])} by {set_by[place]}")
                _check_read(place, value, places.get("loss.loss_type", "dapo"), preference)
        except (ValueError, TypeError) as error:
            outcome = LEFT_OUT if isinstance(error, NotApplicable) else TO_DECIDE
            if outcome == TO_DECIDE or not entry.missing:
                reason = f"{entry.note}: {error}" if entry.missing else str(error)
                rows.append(ForeignKey(entry.key, entry.value, outcome, (), reason, entry.missing))
            continue
        outcome = "renamed" if any(place != entry.key for place in found) else "taken"
        outcome = "written for a default" if entry.missing else outcome
        reason = entry.note or ("" if found else "this is the behavior here")
        rows.append(ForeignKey(entry.key, entry.value, outcome, tuple(found), reason, entry.missing))
        places |= found
        set_by |= dict.fromkeys(found, entry.key)
    return Conversion(source, places, tuple(rows))


def _translated(entry: Entry, siblings: Mapping[str, Any]) -> Places:
    """Translate an entry; ValueError says why the key has no place."""
    if entry.rule is None:
        unknown = NotApplicable if entry.value in NOTHING else ValueError
        raise unknown(UNKNOWN)
    counts = not isinstance(entry.rule, Absent) or entry.rule.decide
    if counts and isinstance(entry.value, str) and "${" in entry.value:
        raise ValueError("has a reference that leads out of this file; set it by hand")
    return translate(entry.rule, entry.value, siblings)


def _check_read(place: str, value: Any, loss_type: Any, preference: bool) -> None:
    """Raise NotApplicable where algorithm or loss do not read a place, ValueError for a wrong level."""
    section, _, name = place.rpartition(".")
    if preference and place.partition(".")[0] in SAMPLING:
        raise NotApplicable("training on fixed completions does not read it")
    facts = CATALOG.get(loss_type) if isinstance(loss_type, str) else None
    if preference or section != "loss" or facts is None:
        return
    if name in loss_specific() and name not in facts.fields:
        raise NotApplicable(f"the chosen loss does not read loss.{name}")
    if name == "importance_sampling_level" and value not in facts.choosable_levels:
        raise ValueError(f"the chosen loss has its own ratio; see loss.{name}")
