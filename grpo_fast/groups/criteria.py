"""Measure distances between prompts: a weighted mean of criteria, each from 0 to 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from grpo_fast.config.groups import CriterionConfig, GroupConfig
from grpo_fast.config.lookup import choices, load_callable
from grpo_fast.data.table import CompletionTable
from grpo_fast.data.types import Prompt, own_text, own_turns, text_of

HASH_BITS = 10
EMBEDDING_WIDTH = 2**HASH_BITS

Distance = Callable[[Tensor, Tensor], Tensor]  # positions (R,), (O,) -> (R, O) float32 in [0, 1]


def weighted_distance(criteria: Sequence[tuple[float, Tensor]]) -> Distance:
    """Return the weighted mean distance of criteria, given as (weight, `prompt_values`)."""
    # A criterion without differences would only dilute the others.
    criteria = [(weight, values) for weight, values in criteria if (values != values[:1]).any()]
    total = sum(weight for weight, _ in criteria)

    def distance(rows: Tensor, others: Tensor) -> Tensor:
        parts = [weight / total * _distances(values[rows], values[others]) for weight, values in criteria]
        return sum(parts, torch.zeros(len(rows), len(others)))

    return distance


def scored_values(
    table: CompletionTable,
    criterion: CriterionConfig,
    kept: Sequence[int],
    functions: Mapping[str, Callable[..., Any]],
) -> Tensor:
    """Return a `SCORED` criterion's values of the `kept` groups of a scored table, for `_distances`."""
    source = f"groups.criteria.by = {criterion.by!r}"
    if criterion.by == "reward":
        values = table.by_group("reward").nanmean(1)
    elif criterion.function is None:
        values = distinct_bigrams(table, table.groups)
    else:
        source = f"groups.criteria.function = {criterion.function!r}"
        function = functions[criterion.function]
        values = _tensor([function(texts) for texts in texts_of(table)], table.num_groups, source)
    return _over_range(values[[*kept]].tolist(), source)


def texts_of(table: CompletionTable) -> list[list[str]]:
    texts = [completion.text for completion in table.objects["completion"]]
    n = len(texts) // table.num_groups
    return [texts[start : start + n] for start in range(0, len(texts), n)]


def distinct_bigrams(table: CompletionTable, owners: Tensor) -> Tensor:
    """Return the share of distinct bigrams of sampled tokens over each owner's completions, (K,).

    Distinct-2 (Li et al. 2016, arXiv:1510.03055, section 5.2), over tokens; the last token of a completion
    forms a bigram with its end. `owners` is (S,) int64 from 0 to K - 1.
    """
    rows = table.spread(torch.arange(len(table)))[table.mask]
    first = table.token_ids[table.mask]
    ends = rows != torch.cat([rows[1:], rows.new_full((1,), -1)])
    second = first.roll(-1).masked_fill(ends, -1)
    bigrams = (first * 2**32 + second).unique(return_inverse=True)[1]
    owner = owners[rows]
    distinct = (owner * len(rows) + bigrams).unique() // len(rows)
    return distinct.bincount() / owner.bincount()


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return distances (R, O) between unit vectors (R, D), numbers in [0, 1] (R,), or int64 labels (R,)."""
    if a.ndim == 2:
        return (1 - a @ b.T).clamp(0, 1)  # 1 for angles of 90 degrees and more
    if a.is_floating_point():
        return (a[:, None] - b[None]).abs()
    return (a[:, None] != b[None]).float()


def conversation_prefix(
    prompt: Prompt, prefix_turns: int | None, example_turns: int
) -> tuple[tuple[str, str], ...] | None:
    """Return a prompt's first `prefix_turns` turns (None: all but the last); None without any.

    A system message and the turns of configured examples are skipped.
    """
    if isinstance(prompt.prompt, str):
        return None
    turns = own_turns(prompt.prompt, example_turns)
    length = len(turns) - 1 if prefix_turns is None else prefix_turns
    if not 0 < length <= len(turns):
        return None
    return tuple((turn["role"], text_of(turn["content"])) for turn in turns[:length])


def label_ids(keys: Iterable[Hashable | None]) -> Tensor:
    """Return a number (N,) int64 for each key, equal for equal keys; each None gets its own number."""
    known: dict[Hashable, int] = {}
    ids = [known.setdefault(object() if key is None else key, len(known)) for key in keys]
    return torch.tensor(ids, dtype=torch.int64)


def tfidf(token_lists: Sequence[Sequence[int]]) -> Tensor:
    """Embed N token sequences as unit vectors, (N, 1024) float32.

    Sublinear term frequency times log(1 + N / document frequency) (Salton and Buckley 1988, Information
    Processing & Management 24, p. 513), hashed with signs into a fixed width, which keeps dot products up to
    noise of 1/32 (Weinberger et al. 2009, arXiv:0902.2206).
    """
    counts = [Counter(tokens) for tokens in token_lists]
    documents = Counter(token for count in counts for token in count)
    rows = torch.tensor([row for row, count in enumerate(counts) for _ in count], dtype=torch.int64)
    tokens = torch.tensor([token for count in counts for token in count], dtype=torch.int64)
    times = torch.tensor([n for count in counts for n in count.values()], dtype=torch.float64)
    frequency = torch.tensor([documents[token] for count in counts for token in count])
    values = (1 + times.log()) * (len(counts) / frequency).log1p()
    # Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): the top bits of a product.
    hashed = tokens * 2654435761 % 2**32
    columns, odd = hashed >> (32 - HASH_BITS), hashed >> (31 - HASH_BITS) & 1
    flat = torch.zeros(len(counts) * EMBEDDING_WIDTH)
    flat.index_add_(0, rows * EMBEDDING_WIDTH + columns, (values * (1 - 2 * odd)).float())
    return normalize(flat.view(-1, EMBEDDING_WIDTH))


def prompt_values(prompts: Sequence[Prompt], by: str, config: GroupConfig, example_turns: int = 0) -> Tensor:
    """Return a criterion's values of prompts, for `_distances`; raise ValueError if it does not fit them."""
    source = f"groups.criteria.by = {by!r}"
    if by == "embedding" and config.embedding == "tfidf":
        return tfidf([prompt.token_ids for prompt in prompts])
    if by == "length":
        return _over_range([len(prompt.token_ids) for prompt in prompts], source)
    if by == "prefix":
        return label_ids(conversation_prefix(p, config.prefix_turns, example_turns) for p in prompts)
    if by.startswith("column:"):
        name = by.removeprefix("column:")
        if name not in prompts[0].columns:
            raise ValueError(f"{source}: there is no such column: {choices(name, prompts[0].columns)}")
        column: list[Any] = [prompt.columns.get(name) for prompt in prompts]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in column):
            return _over_range(column, source)
        return label_ids(None if value is None else repr(value) for value in column)
    if by == "embedding":
        source = f"groups.embedding = {config.embedding!r}"
        texts = [own_text(prompt, example_turns) for prompt in prompts]
        found = load_callable(config.embedding, "groups.embedding")(texts)
    elif ":" in by:
        found = load_callable(by, "groups.criteria.by")(prompts)
    else:
        known = "embedding, prefix, length, reward, diversity, column:NAME or 'module:function'"
        raise ValueError(f"{source} is unknown; choose {known}")
    values = _tensor(found, len(prompts), source)
    return normalize(values) if values.ndim == 2 else _over_range(values.tolist(), source)


def _over_range(values: Sequence[float], source: str) -> Tensor:
    numbers = torch.tensor(values, dtype=torch.float64)
    if not numbers.isfinite().all():
        raise ValueError(f"{source} has values that are not finite; clean the column")
    low, high = numbers.min(), numbers.max()
    return ((numbers - low) / (high - low if high > low else 1.0)).float()


def _tensor(values: Any, n: int, source: str) -> Tensor:
    """Convert what a user's function returned to (n,) or (n, D) float32."""
    try:
        tensor = torch.as_tensor(values, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"{source} returned no array of numbers ({error})"
        raise ValueError(f"{problem}; return one number or vector each") from None
    if tensor.ndim not in (1, 2) or len(tensor) != n:
        problem = f"{source} returned shape {tuple(tensor.shape)} for {n} prompts"
        raise ValueError(f"{problem}; return ({n},) or ({n}, D)")
    if not tensor.isfinite().all():
        raise ValueError(f"{source} returned values that are not finite; return finite numbers")
    return tensor
