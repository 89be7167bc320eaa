"""Ranked groups: in a file, and made from scores, people's rankings, several criteria or rollouts.

A file holds one JSON object a line, `{"prompt", "group": [{"response", "rank"}, ...]}`.

| field | |
|---|---|
| `prompt` | text, or a list of messages |
| `group` | at least two responses |
| `group[i].response` | text |
| `group[i].rank` | 1 is best; equal ranks are ties |
| `group[i].score` | instead of ranks, for the whole group: higher is better; equal scores are ties |
| `group[i].logprob` | optional: log-probability of the response under the policy that wrote it, summed |
| `group_type` | optional: text; evaluation reports each type of its own |
| `weight` | optional: factor of the group's loss |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grpo_fast.data.types import Message
from grpo_fast.run_record.files import JsonlLog, read_jsonl

if TYPE_CHECKING:
    from grpo_fast.experience import Group

Prompt = str | list[Message]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class RankedResponse:
    """A response and what it deserves."""

    response: str
    grade: float  # higher is better
    logprob: float | None = None  # under the policy that wrote it, summed


@dataclass(frozen=True)
class RankedGroup:
    """A prompt's responses, in the order of the file."""

    prompt: Prompt
    responses: tuple[RankedResponse, ...]
    group_type: str | None = None
    weight: float = 1.0


class Weighted(BaseModel):
    """What any row of data may hold. Keys that are null count as absent: Arrow gives all rows all keys."""

    weight: Annotated[Number, Field(ge=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, row: Any) -> Any:
        return {k: v for k, v in row.items() if v is not None} if isinstance(row, Mapping) else row


class _Item(Weighted):
    model_config = ConfigDict(extra="forbid")

    response: str
    rank: Annotated[Number, Field(ge=1)] | None = None  # 1 is best
    score: Number | None = None
    logprob: Annotated[Number, Field(le=0)] | None = None

    @field_validator("response")
    @classmethod
    def _not_empty(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("give text that is not empty")
        return text

    @model_validator(mode="after")
    def _one_grade(self) -> _Item:
        if (self.rank is None) == (self.score is None):
            given = "neither" if self.rank is None else "both"
            raise ValueError(f"has {given} of rank and score; give one of them")
        return self

    @property
    def grade(self) -> float:
        return -self.rank if self.rank is not None else self.score or 0.0


class _Row(Weighted):
    prompt: Any = None
    group: Annotated[list[_Item], Field(min_length=2)]
    group_type: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _Row:
        if len({item.rank is None for item in self.group}) > 1:
            raise ValueError("group mixes rank and score; give all responses the same one")
        first: dict[str, int] = {}
        for i, item in enumerate(self.group):
            earlier = first.setdefault(item.response, i)
            if self.group[earlier].grade != item.grade:
                raise ValueError(
                    f"group[{earlier}] and group[{i}] are the same response with different grades; keep one"
                )
        return self


def read_row(model: type[M], row: Mapping[str, Any], where: str) -> M:
    """A row of data as `model`.

    Raises:
        ValueError: names `where`, the field and its value, and says what is expected.
    """
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])[1:]
        value = repr(first["input"])
        value = value if len(value) <= 80 else f"{value[:77]}..."
        problem = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {f'{field} = {value}: ' if field else ''}{problem}") from None


def parse_group(row: Mapping[str, Any], where: str, prompt: Prompt | None = None) -> RankedGroup:
    """Read one row.

    Args:
        row: as above.
        where: the file and line, for error messages.
        prompt: the prompt, where it is not in the row.

    Raises:
        ValueError: names `where`, the field, its value and the remedy.
    """
    prompt = row.get("prompt") if prompt is None else prompt
    if not prompt or not isinstance(prompt, str | list):
        raise ValueError(f"{where}: prompt = {prompt!r} must be text or a list of messages")
    found = read_row(_Row, row, where)
    responses = tuple(RankedResponse(item.response, item.grade, item.logprob) for item in found.group)
    return RankedGroup(prompt, responses, found.group_type, found.weight)


def read_ranked(path: str | Path) -> list[RankedGroup]:
    """The groups of a JSONL file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is no group; the message names the line and the field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return [
        parse_group(row, f"{path}, line {number}") for number, row in enumerate(read_jsonl(path), start=1)
    ]


def write_ranked(path: str | Path, groups: Iterable[RankedGroup]) -> None:
    """Write groups as `read_ranked` reads them, grades as scores. An existing file is replaced."""
    log = JsonlLog(Path(path))
    try:
        log.truncate(0)
        for group in groups:
            items = [
                {"response": r.response, "score": r.grade, "logprob": r.logprob} for r in group.responses
            ]
            options = {"group_type": group.group_type, "weight": group.weight}
            log.append({"prompt": group.prompt, "group": items, **options})
    finally:
        log.close()


# ------------------------------------------------------------------------------------------ making groups


def group_from_scores(
    prompt: Prompt,
    responses: Sequence[str],
    scores: Sequence[float],
    *,
    tie_width: float = 0.0,
    group_type: str | None = None,
) -> RankedGroup:
    """A group graded by scores, higher is better.

    Args:
        tie_width: scores are rounded to multiples of it, so that differences of noise become ties; 0 keeps
            them.

    Raises:
        ValueError: fewer than two responses, not one score each, or a negative width.
    """
    _check_lengths(responses, scores=scores)
    if tie_width < 0:
        raise ValueError(f"tie_width = {tie_width} must not be negative; 0 keeps the scores as they are")
    grades = [tie_width * round(score / tie_width) if tie_width else float(score) for score in scores]
    return _group(prompt, responses, grades, group_type)


def group_from_rankings(
    prompt: Prompt,
    responses: Sequence[str],
    rankings: Sequence[Sequence[int]],
    *,
    group_type: str | None = None,
) -> RankedGroup:
    """A group graded by one or several people, by mean rank (Borda's count, ties sharing their places).

    Args:
        rankings: for each person the rank of every response, 1 the best; equal ranks are ties.

    Raises:
        ValueError: no ranking, or one that does not rank every response.
    """
    if not rankings:
        raise ValueError("rankings is empty; give at least one person's ranks")
    for i, ranks in enumerate(rankings):
        _check_lengths(responses, **{f"rankings[{i}]": ranks})
    # Comparable between people: tied responses share the mean of the places they take.
    places = [
        [sum(other < rank for other in ranks) + (ranks.count(rank) + 1) / 2 for rank in ranks]
        for ranks in map(list, rankings)
    ]
    return _group(prompt, responses, [-fmean(taken) for taken in zip(*places, strict=True)], group_type)


def group_from_criteria(
    prompt: Prompt,
    responses: Sequence[str],
    criteria: Mapping[str, Sequence[float]],
    weights: Mapping[str, float] | None = None,
    *,
    group_type: str | None = None,
) -> RankedGroup:
    """A group graded by a weighted sum of criteria, each standardised over the group.

    A criterion in which all responses are equal orders nothing and counts zero, whatever its scale.

    Args:
        criteria: by name, a score for every response, higher is better.
        weights: by name, not negative; they are divided by their sum. None: all equal.

    Raises:
        ValueError: no criteria, not one score each, weights of other criteria, or none above zero.
    """
    if not criteria:
        raise ValueError("criteria is empty; give at least one")
    _check_lengths(responses, **criteria)
    weights = dict.fromkeys(criteria, 1.0) if weights is None else weights
    if set(weights) != set(criteria):
        raise ValueError(
            f"weights are of {sorted(weights)} and criteria of {sorted(criteria)}; give the same names"
        )
    total = sum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"weights = {dict(weights)} must not be negative, and one must be above zero")
    grades = [0.0] * len(responses)
    for name, scores in criteria.items():
        if max(scores) > min(scores):
            mean, scale = fmean(scores), weights[name] / total / pstdev(scores)
            grades = [grade + scale * (score - mean) for grade, score in zip(grades, scores, strict=True)]
    # Equal sums of different addends differ in their last bits.
    return _group(prompt, responses, [round(grade, 12) for grade in grades], group_type)


def groups_from_rollouts(groups: Iterable[Group], *, group_type: str | None = None) -> list[RankedGroup]:
    """What a policy sampled, graded by its rewards, with the log-probabilities it was sampled at.

    A completion drawn twice counts once. Groups left with one response, or with rewards all equal, order
    nothing and are left out; so is a completion whose reward is not applicable (NaN).
    """
    ranked = []
    for group in groups:
        found: dict[str, RankedResponse] = {}
        for completion, reward in zip(group.completions, group.rewards.tolist(), strict=True):
            if reward == reward and completion.text.strip():
                response = RankedResponse(completion.text, reward, sum(completion.logprobs))
                found.setdefault(completion.text, response)
        if len({response.grade for response in found.values()}) > 1:
            ranked.append(RankedGroup(group.prompt.prompt, tuple(found.values()), group_type))
    return ranked


def pairs_from_group(group: RankedGroup, *, every: bool = False) -> list[dict[str, Prompt]]:
    """Rows `prompt`, `chosen`, `rejected`: the best and the worst response, or every two that differ."""
    ordered = sorted(group.responses, key=lambda response: -response.grade)
    candidates = list(combinations(ordered, 2)) if every else [(ordered[0], ordered[-1])]
    return [
        {"prompt": group.prompt, "chosen": better.response, "rejected": worse.response}
        for better, worse in candidates
        if better.grade > worse.grade
    ]


def _group(
    prompt: Prompt, responses: Sequence[str], grades: Sequence[float], group_type: str | None
) -> RankedGroup:
    items = tuple(RankedResponse(text, grade) for text, grade in zip(responses, grades, strict=True))
    return RankedGroup(prompt, items, group_type)


def _check_lengths(responses: Sequence[str], **values: Sequence[float]) -> None:
    if len(responses) < 2:
        raise ValueError(f"{len(responses)} responses have no order; give at least two")
    for name, given in values.items():
        if len(given) != len(responses):
            raise ValueError(
                f"{name} has {len(given)} values for {len(responses)} responses; give one for each"
            )
