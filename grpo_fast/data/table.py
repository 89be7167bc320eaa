"""Completions as columns: the one table that goes from the engine to the loss.

Completions are one flat array of tokens with offsets. A column has a value for each token (its advantage, its
log-probability), a fact one for each completion (its reward). Packing, selecting and exchanging between
ranks carry both along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXPERTS = "experts"  # the inputs' (L, k) experts that the sampler chose in each of L layers
UNKNOWN = -1  # in `inputs`, where nothing is told
BASELINE = "baseline_group"  # the fact: completions of equal values share a baseline
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class CompletionTable:
    """S completions of G groups, N tokens after P prompts. A prompt's tokens are held once.

    Structure is on the CPU; columns and facts are on any device.
    """

    prompt_ids: Tensor  # int64: the tokens of all prompts, one prompt after the other
    prompt_offsets: Tensor  # (P + 1,) int64: where each prompt begins, and their end
    prompts: Tensor  # (S,) int64 in [0, P): the prompt that a completion answers; a prompt is of one group
    groups: Tensor  # (S,) int64: completions of one group are compared with one another
    token_ids: Tensor  # (N,) int64
    offsets: Tensor  # (S + 1,) int64: where each completion begins, and N
    mask: Tensor  # (N,) bool: what the model wrote and learns from; an environment's tokens are false
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # by name (N,)
    facts: Mapping[str, Tensor] = field(default_factory=dict)  # by name (S, ...)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # by name (P + N, ...): what is known of the
    # tokens of all prompts, and then of all completions, as inputs of the model; on any device
    objects: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # S each; None of other ranks
    logged: Mapping[str, Tensor] = field(default_factory=dict)  # what rewards logged
    layouts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Micro-batches of these rows by what they were packed within, for whoever packs them. Other columns do
    not change them, other rows do."""

    @staticmethod
    def of(
        prompts: Iterable[Sequence[int]],
        token_ids: Iterable[Sequence[int]],
        groups: Sequence[int] | None = None,
        *,
        mask: Iterable[Sequence[bool] | None] | None = None,
        facts: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Sequence[Integers]] | None = None,
        objects: Mapping[str, Iterable[Any]] | None = None,
        **columns: Iterable[Sequence[float]] | None,
    ) -> CompletionTable:
        """From a list for each of S completions.

        Args:
            prompts: the prompt's tokens of each.
            token_ids: its own.
            groups: an integer each; none: completions of one prompt are a group.
            mask: which of its tokens the model wrote; none: all.
            facts: S values each.
            inputs: of each completion integers (t, ...) for the first t tokens of its prompt and itself; of a
                prompt those of its first completion are kept.
            objects: S Python objects each.
            columns: of each completion a number a token; a column that is None is left out.

        Raises:
            ValueError: an empty prompt or completion, nothing that the model wrote, or lengths that differ.
        """
        of_each, tokens = [*map(tuple, prompts)], [*token_ids]
        places: dict[Any, int] = {}
        keys = [*zip(of_each if groups is None else groups, of_each, strict=True)]
        numbers = [places.setdefault(key, len(places)) for key in keys]
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        written = [None] * len(tokens) if mask is None else [*mask]
        flat_mask = np.ones(int(lengths.sum()), bool)
        if any(one is not None for one in written):
            whole = [(True,) * len(t) if one is None else one for one, t in zip(written, tokens, strict=True)]
            flat_mask = _flat("mask", whole, lengths, np.bool_)
        found = {n: _flat(n, v, lengths, np.float32) for n, v in columns.items() if v is not None}
        distinct = [prompt for _, prompt in places]
        table = CompletionTable(
            prompt_ids=torch.from_numpy(np.fromiter(chain.from_iterable(distinct), np.int64)),
            prompt_offsets=torch.from_numpy(offsets_of([len(prompt) for prompt in distinct])),
            prompts=torch.tensor(numbers, dtype=torch.int64),
            groups=torch.tensor(numbers if groups is None else list(groups), dtype=torch.int64),
            token_ids=torch.from_numpy(_flat("token_ids", tokens, lengths, np.int64)),
            offsets=torch.from_numpy(offsets_of(lengths)),
            mask=torch.from_numpy(flat_mask),
            columns={name: torch.from_numpy(values) for name, values in found.items()},
            facts={name: torch.as_tensor(values) for name, values in (facts or {}).items()},
            inputs={
                name: _of_inputs(values, numbers, [*map(len, distinct)], lengths)
                for name, values in (inputs or {}).items()
            },
            objects={name: tuple(values) for name, values in (objects or {}).items()},
        )
        table.check()
        return table

    def check(self) -> None:
        """Raises ValueError for a completion without a prompt, or without a token of the model's."""
        if empty := np.flatnonzero(np.diff(self.prompt_offsets.numpy()) == 0).tolist():
            first = int(np.flatnonzero(np.isin(self.prompts.numpy(), empty))[0])
            raise ValueError(f"prompts[{first}] is empty: nothing predicts the first completion token")
        if len(bad := (self.num_targets == 0).nonzero()):
            raise ValueError(
                f"token_ids[{int(bad[0])}] is empty, or nothing of it is the model's; leave it out"
            )

    def __len__(self) -> int:
        """Completions."""
        return len(self.prompts)

    def __getitem__(self, rows: slice) -> CompletionTable:
        return self.select(range(len(self))[rows])

    @property
    def num_groups(self) -> int:
        """Where groups are numbered from 0."""
        return int(self.groups[-1]) + 1 if len(self) else 0

    @property
    def compared(self) -> Tensor:
        """(S,) int64: completions of equal values are compared with one another; their groups by default."""
        return self.facts.get(BASELINE, self.groups)

    @cached_property
    def lengths(self) -> Tensor:
        """(S,) int64 tokens of each completion."""
        return self.offsets.diff()

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """(S,) int64 tokens of each completion's prompt."""
        return self.prompt_offsets.diff()[self.prompts]

    @cached_property
    def num_targets(self) -> Tensor:
        """(S,) int64 tokens of each completion that the model wrote: those that a loss is of."""
        written = torch.cat([self.mask.new_zeros(1, dtype=torch.int64), self.mask.cumsum(0)])
        return written[self.offsets].diff()

    def prompt_of(self, row: int) -> Tensor:
        """Tokens of the prompt that a completion answers."""
        start, end = self.prompt_offsets[self.prompts[row] : self.prompts[row] + 2]
        return self.prompt_ids[start:end]

    def tokens_of(self, row: int) -> Tensor:
        """Tokens of a completion."""
        return self.token_ids[self.offsets[row] : self.offsets[row + 1]]

    def with_columns(self, **columns: Tensor | None) -> CompletionTable:
        """With these columns, (N,) each, beside or in place of others; without those that are None."""
        known = {**self.columns, **columns}
        return self._same_rows(columns={name: v for name, v in known.items() if v is not None})

    def with_facts(self, **facts: Tensor) -> CompletionTable:
        """With these facts, (S, ...) each, beside or in place of others."""
        return self._same_rows(facts={**self.facts, **facts})

    def with_objects(self, **objects: tuple[Any, ...]) -> CompletionTable:
        """With these objects, S each, beside or in place of others."""
        return self._same_rows(objects={**self.objects, **objects})

    def to(self, device: torch.device) -> CompletionTable:
        """With columns and inputs on a device."""
        columns, inputs = (
            {name: values.to(device) for name, values in part.items()} for part in (self.columns, self.inputs)
        )
        return replace(self, columns=columns, inputs=inputs)

    def _same_rows(self, **changes: Any) -> CompletionTable:
        changed = replace(self, **changes)
        object.__setattr__(changed, "layouts", self.layouts)
        return changed

    def spread(self, per_completion: Tensor) -> Tensor:
        """(S,) -> (N,): every token gets its completion's value."""
        return per_completion.repeat_interleave(self.lengths.to(per_completion.device))

    def sums(self, per_token: Tensor) -> Tensor:
        """(N,) -> (S,): over the tokens that the model wrote."""
        rows = self.spread(torch.arange(len(self))).to(per_token.device)
        kept = torch.where(self.mask.to(per_token.device), per_token, 0).double()
        return kept.new_zeros(len(self)).index_add(0, rows, kept).to(per_token.dtype)

    def by_group(self, fact: str) -> Tensor:
        """(G, n, ...) of groups that lie one after the other, n completions each."""
        values, groups = self.facts[fact], self.num_groups
        return values.view(groups, len(self) // max(1, groups), *values.shape[1:])

    def select(self, rows: Tensor | Sequence[int]) -> CompletionTable:
        """These completions with their prompts, in this order; groups keep their numbers."""
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        tokens = torch.from_numpy(ranges(self.offsets[chosen].numpy(), self.lengths[chosen].numpy()))
        places = chosen.tolist()
        used, prompts = self.prompts[chosen].unique(return_inverse=True)
        sizes = self.prompt_offsets.diff()[used].numpy()
        before = torch.from_numpy(ranges(self.prompt_offsets[used].numpy(), sizes))
        return replace(
            self,
            prompt_ids=self.prompt_ids[before],
            prompt_offsets=torch.from_numpy(offsets_of(sizes)),
            prompts=prompts,
            groups=self.groups[chosen],
            token_ids=self.token_ids[tokens],
            offsets=torch.from_numpy(offsets_of(self.lengths[chosen].numpy())),
            mask=self.mask[tokens],
            columns={name: values[tokens.to(values.device)] for name, values in self.columns.items()},
            facts={name: values[chosen.to(values.device)] for name, values in self.facts.items()},
            inputs={
                name: values[torch.cat([before, tokens + len(self.prompt_ids)]).to(values.device)]
                for name, values in self.inputs.items()
            },
            objects={name: tuple(values[i] for i in places) for name, values in self.objects.items()},
        )

    def select_groups(self, groups: Sequence[int]) -> CompletionTable:
        """These groups, in this order, numbered anew."""
        wanted, order = torch.tensor([*groups], dtype=torch.int64), self.groups.argsort(stable=True)
        first, end = (torch.searchsorted(self.groups[order], wanted, right=right) for right in (False, True))
        sizes = end - first
        chosen = self.select(order[torch.from_numpy(ranges(first.numpy(), sizes.numpy()))])
        return replace(chosen, groups=torch.arange(len(wanted)).repeat_interleave(sizes))

    @staticmethod
    def join(tables: Sequence[CompletionTable]) -> CompletionTable:
        """One after the other, groups numbered on.

        Raises:
            ValueError: a column or a fact that one table lacks.
        """
        if len(tables) == 1:
            return tables[0]
        for what in ("columns", "facts", "inputs"):
            names = [{*getattr(table, what)} for table in tables]
            if lacking := sorted(set.union(*names) - set.intersection(*names)):
                raise ValueError(
                    f"{what} {lacking} are of some completions only; give them for all, or for none"
                )

        def joined(values: Callable[[CompletionTable], Tensor]) -> Tensor:
            return torch.cat([values(table) for table in tables])

        def shifted(values: Callable[[CompletionTable], Tensor], sizes: Iterable[int]) -> Tensor:
            before = torch.tensor([0, *sizes][: len(tables)]).cumsum(0)
            return torch.cat([values(t) + start for t, start in zip(tables, before, strict=True)])

        def by_name(part: str) -> dict[str, Tensor]:
            of_each: list[Mapping[str, Tensor]] = [getattr(table, part) for table in tables]
            names = dict.fromkeys(chain.from_iterable(of_each))
            return {name: torch.cat([own[name] for own in of_each if name in own]) for name in names}

        def inputs(name: str) -> Tensor:
            parts = [t.inputs[name].tensor_split([len(t.prompt_ids)]) for t in tables]
            return torch.cat([*(of_prompts for of_prompts, _ in parts), *(rest for _, rest in parts)])

        def objects(name: str) -> tuple[Any, ...]:
            return tuple(value for t in tables for value in t.objects.get(name, (None,) * len(t)))

        return CompletionTable(
            prompt_ids=joined(lambda t: t.prompt_ids),
            prompt_offsets=torch.from_numpy(offsets_of(joined(lambda t: t.prompt_offsets.diff()).numpy())),
            prompts=shifted(lambda t: t.prompts, [len(t.prompt_offsets) - 1 for t in tables]),
            groups=shifted(lambda t: t.groups, [t.num_groups for t in tables]),
            token_ids=joined(lambda t: t.token_ids),
            offsets=torch.from_numpy(offsets_of(joined(lambda t: t.lengths).numpy())),
            mask=joined(lambda t: t.mask),
            columns=by_name("columns"),
            facts=by_name("facts"),
            inputs={name: inputs(name) for name in tables[0].inputs},
            objects={name: objects(name) for name in dict.fromkeys(n for t in tables for n in t.objects)},
            logged=by_name("logged"),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the objects, by name: what ranks exchange."""
        named = {f"{part}/{name}": v for part in PARTS for name, v in getattr(self, part).items()}
        return {name: getattr(self, name) for name in STRUCTURE} | named

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> CompletionTable:
        """What `tensors` has given."""
        fields: dict[str, Any] = {name: tensors[name] for name in STRUCTURE} | {part: {} for part in PARTS}
        for name, values in tensors.items():
            part, _, rest = name.partition("/")
            if rest:
                fields[part][rest] = values
        return CompletionTable(**fields)


STRUCTURE = ("prompt_ids", "prompt_offsets", "prompts", "groups", "token_ids", "offsets", "mask")
PARTS = ("columns", "facts", "inputs", "logged")


def offsets_of(lengths: Sequence[int] | Integers) -> Integers:
    """(n,) lengths -> (n + 1,): where each begins, and the end of all."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """The integers from each start on, as many as its length, one range after the other."""
    before = offsets_of(lengths)
    return np.repeat(starts - before[:-1], lengths) + np.arange(before[-1])


def _flat(name: str, values: Iterable[Sequence[Any]], lengths: Integers, dtype: type) -> Any:
    """One array of what each completion has."""
    listed = [*values]
    found = [len(own) for own in listed]
    for row, (own, length) in enumerate(zip(found, lengths.tolist(), strict=True)):
        if own != length:
            raise ValueError(
                f"{name}[{row}] has {own} entries for {length} completion tokens; give one for each"
            )
    return np.fromiter(chain.from_iterable(listed), dtype, sum(found))


def _of_inputs(
    values: Sequence[Integers], numbers: Sequence[int], prompts: Sequence[int], lengths: Integers
) -> Tensor:
    """(P + N, ...) of what is told (t, ...) of each completion's prompt and the completion, one after the
    other; `UNKNOWN` beyond."""
    first = {number: row for row, number in reversed([*enumerate(numbers)])}
    spans = [(values[first[number]], 0, length) for number, length in enumerate(prompts)]
    for own, number, length in zip(values, numbers, lengths.tolist(), strict=True):
        spans.append((own, prompts[number], prompts[number] + length))
    found = np.full((sum(end - start for _, start, end in spans), *values[0].shape[1:]), UNKNOWN, np.int16)
    place = 0
    for told, start, end in spans:
        part = told[start:end]
        found[place : place + len(part)] = part
        place += end - start
    return torch.from_numpy(found)
