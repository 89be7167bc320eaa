"""What a conversion gives: our configuration, and for each foreign key what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from grpo_fast.config_io.errors import short
from grpo_fast.config_io.foreign_names import RULES
from grpo_fast.config_io.foreign_rules import Absent, Places, Translate
from grpo_fast.config_io.yaml_text import dump_yaml
from grpo_fast.convert import preference
from grpo_fast.objective.catalog import CATALOG

FILL_IN = "FILL_IN"
REQUIRED = {"model.path": FILL_IN, "dataset.source": FILL_IN, "rewards": [{"reward": FILL_IN}]}
UNKNOWN = "is not a key that this converter knows"
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

    def tree(self) -> dict[str, Any]:
        """The configuration as nested mappings."""
        tree: dict[str, Any] = {}
        for place, value in self.places.items():
            *way, last = place.split(".")
            node = tree
            for part in way:
                node = node.setdefault(part, {})
            if value == {}:
                node.setdefault(last, {})
            else:
                node[last] = value
        return tree

    def yaml(self) -> str:
        head = f"# Converted from {self.source}.\n"
        if self.fill_in:
            head += f"# To fill in: {', '.join(self.fill_in)}.\n"
        return head + dump_yaml(self.tree())

    def listing(self) -> str:
        """Each key with what became of it, those without a place together under their reason."""
        lines = []
        for row in self.rows:
            if row.outcome != "not applicable":
                target = f" -> {', '.join(row.places)}" if row.places and row.places != (row.key,) else ""
                note = f" ({row.reason})" if row.reason else ""
                lines.append(f"{row.outcome}: {row}{target}{note}")
        left = [row for row in self.rows if row.outcome == "not applicable"]
        by_reason = attrgetter("reason")
        for reason, rows in groupby(sorted(left, key=by_reason), key=by_reason):
            lines.append(f"not applicable: {reason}")
            lines += [f"  {row}" for row in rows]
        if self.fill_in:
            lines.append(f"to fill in, for the file does not say: {', '.join(self.fill_in)}")
        return "\n".join(lines)


@dataclass
class Account:
    """A conversion under way."""

    source: str
    preference: bool = False  # trains on pairs instead of the policy's own completions
    places: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    set_by: dict[str, str] = field(default_factory=dict)  # place -> the key that set it

    def __post_init__(self) -> None:
        if self.preference:
            self.places["algorithm"] = "dpo"
            self.set_by["algorithm"] = "the kind of file"

    def put(self, key: str, value: Any, places: Places, reason: str = "", *, default: bool = False) -> None:
        """A key that sets these places, unless another key has set them or the loss would not read them."""
        for place, item in places.items():
            problem = self._clash(place, item) or self._unread(place, item)
            if problem:
                return self.leave(key, value, problem)
        self.places.update(places)
        self.set_by.update(dict.fromkeys(places, key))
        outcome: Outcome = "written for a default" if default else "renamed"
        if not places or tuple(places) == (key,):
            outcome, reason = "taken", reason or ("" if places else "it is so here anyway")
        self.rows.append(Row(key, value, outcome, tuple(places), reason))

    def leave(self, key: str, value: Any, reason: str) -> None:
        """A key without a place."""
        self.rows.append(Row(key, value, "not applicable", reason=reason))

    def by_table(self, key: str, name: str, value: Any, siblings: Mapping[str, Any]) -> None:
        """A key by the one table of foreign names."""
        rule = RULES.get(name)
        if self.preference and name in preference.TERMS:
            self.translate(key, value, preference.TERMS[name], siblings)
        elif rule is None:
            self.leave(key, value, UNKNOWN)
        elif isinstance(rule, Absent):
            self.leave(key, value, rule.reason)
        else:
            self.translate(key, value, rule.translate, siblings)

    def translate(self, key: str, value: Any, translate: Translate, siblings: Mapping[str, Any]) -> None:
        """A key by a translation, which may say that the value has no equivalent."""
        try:
            self.put(key, value, translate(value, siblings))
        except (ValueError, TypeError) as error:
            self.leave(key, value, str(error))

    def finish(self) -> Conversion:
        wanted = [place for place in REQUIRED if not (self.preference and place in preference.SAMPLING)]
        missing = tuple(place for place in wanted if place not in self.places)
        places = {**{place: REQUIRED[place] for place in missing}, **self.places}
        if "max_steps" not in places:  # the source counts epochs; ours has a default that nobody chose
            missing += ("max_steps",)
        return Conversion(self.source, places, tuple(self.rows), missing)

    def _clash(self, place: str, value: Any) -> str:
        if place in self.places and self.places[place] != value:
            return f"{place} is {short(self.places[place])} by {self.set_by[place]}"
        return ""

    def _unread(self, place: str, value: Any) -> str:
        """Why a place would be refused beside the algorithm and the loss that are chosen."""
        if self.preference and place.partition(".")[0] in preference.SAMPLING:
            return preference.UNREAD
        section, _, name = place.rpartition(".")
        facts = CATALOG.get(self.places.get("loss.loss_type", "dapo"))
        if section != "loss" or facts is None:
            return ""
        unread = name in _LOSS_SPECIFIC and name not in facts.fields
        if name == "importance_sampling_level":
            unread = value not in facts.choosable_levels
        return f"the loss that is chosen does not read loss.{name}" if unread else ""
