"""Makes ranked groups: from scores, from people's rankings, from several criteria, from rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from grpo_fast.data.types import Message
from grpo_fast.preference.ranked import RankedGroup, RankedResponse

if TYPE_CHECKING:
    from grpo_fast.experience import Group

Prompt = str | list[Message]


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
    places = [_shared_places(ranks) for ranks in rankings]
    grades = [-fmean(place[i] for place in places) for i in range(len(responses))]
    return _group(prompt, responses, grades, group_type)


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
    standardised = {name: _standardised(scores) for name, scores in criteria.items()}
    grades = [
        sum(weights[name] / total * standardised[name][i] for name in criteria) for i in range(len(responses))
    ]
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
    candidates = (
        [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]]
        if every
        else [(ordered[0], ordered[-1])]
    )
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


def _shared_places(ranks: Sequence[int]) -> list[float]:
    """Ranks made comparable between people: tied responses share the mean of the places they take."""
    return [
        sum(other < rank for other in ranks) + (sum(other == rank for other in ranks) + 1) / 2
        for rank in ranks
    ]


def _standardised(scores: Sequence[float]) -> list[float]:
    if max(scores) == min(scores):
        return [0.0] * len(scores)
    mean, deviation = fmean(scores), pstdev(scores)
    return [(score - mean) / deviation for score in scores]
