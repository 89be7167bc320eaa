"""Store completions as columns, in the one table that goes from the engine to the loss.

Completions are one flat array of tokens with offsets. A column has a value per token (advantage,
log-probability), a fact one per completion (reward). Packing, selection and exchange between ranks keep both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

EXPERTS = "experts"  # an input: the k experts that the rollout's router chose in each of L layers
UNKNOWN = -1  # in `inputs`, for a token without a value
BASELINE = "baseline_group"  # a fact: completions of equal values share a baseline
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class CompletionTable:
    """S completions of G groups, with N tokens, to P prompts, each of which is stored once.

    Structure is on the CPU; columns, facts and inputs are on any device.
    """

    prompt_ids: Tensor  # int64: the tokens of all prompts, concatenated
    prompt_offsets: Tensor  # (P + 1,) int64: where each prompt begins, and their end
    prompts: Tensor  # (S,) int64 in [0, P): each completion's prompt; a prompt belongs to one group
    groups: Tensor  # (S,) int64: each completion's group
    token_ids: Tensor  # (N,) int64
    offsets: Tensor  # (S + 1,) int64: where each completion begins, and N
    mask: Tensor  # (N,) bool: true for sampled tokens, false for those of an environment
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # by name (N,)
    facts: Mapping[str, Tensor] = field(default_factory=dict)  # by name (S, ...)
    # By name (tokens of all prompts + N, ...): further inputs of the model.
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    objects: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # S each; None on other ranks
    logged: Mapping[str, Tensor] = field(default_factory=dict)  # metrics that rewards logged
    # Packed micro-batches of these rows, by their limits; new columns keep them, other rows do not.
    layouts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        """Make a table from one entry per completion in each argument.

        Args:
            prompts: the prompt's tokens.
            token_ids: the completion's tokens.
            groups: an integer; None: completions of one prompt are a group.
            mask: which of its tokens are sampled; None: all.
            facts: a value.
            inputs: integers (t, ...) for the first t tokens of prompt and completion. A prompt gets those of
                its first completion.
            objects: a Python object.
            columns: a number per token; a column that is None is left out.

        Raises:
            ValueError: an empty prompt or completion, one without a sampled token, or lengths that differ.
        """
        of_each, tokens = [*map(tuple, prompts)], [*token_ids]
        if () in of_each:
            raise ValueError(f"prompts[{of_each.index(())}] is empty: nothing predicts the first token")
        places: dict[Any, int] = {}
        keys = [*zip(of_each if groups is None else groups, of_each, strict=True)]
        numbers = [places.setdefault(key, len(places)) for key in keys]
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        masks = [None] * len(tokens) if mask is None else [*mask]
        whole = [(True,) * len(t) if one is None else one for one, t in zip(masks, tokens, strict=True)]
        found = {n: _flat(n, v, lengths, np.float32) for n, v in columns.items() if v is not None}
        distinct = [prompt for _, prompt in places]
        table = CompletionTable(
            prompt_ids=torch.from_numpy(np.fromiter(chain.from_iterable(distinct), np.int64)),
            prompt_offsets=torch.from_numpy(offsets_of([len(prompt) for prompt in distinct])),
            prompts=torch.tensor(numbers, dtype=torch.int64),
            groups=torch.tensor(numbers if groups is None else list(groups), dtype=torch.int64),
            token_ids=torch.from_numpy(_flat("token_ids", tokens, lengths, np.int64)),
            offsets=torch.from_numpy(offsets_of(lengths)),
            mask=torch.from_numpy(_flat("mask", whole, lengths, np.bool_)),
            columns={name: torch.from_numpy(values) for name, values in found.items()},
            facts={name: torch.as_tensor(values) for name, values in (facts or {}).items()},
            inputs={
                name: _of_inputs(values, numbers, [*map(len, distinct)], lengths)
                for name, values in (inputs or {}).items()
            },
            objects={name: tuple(values) for name, values in (objects or {}).items()},
        )
        if len(bad := (table.num_targets == 0).nonzero()):
            raise ValueError(f"token_ids[{int(bad[0])}] is empty or has no sampled token; leave it out")
        return table

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, rows: slice) -> CompletionTable:
        return self.select(range(len(self))[rows])

    @property
    def num_groups(self) -> int:
        """G, if groups are numbered from 0."""
        return int(self.groups[-1]) + 1 if len(self) else 0

    @property
    def compared(self) -> Tensor:
        """(S,) int64: equal for completions that share a baseline; the groups by default."""
        return self.facts.get(BASELINE, self.groups)

    @cached_property
    def lengths(self) -> Tensor:
        """(S,) int64: tokens of each completion."""
        return self.offsets.diff()

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """(S,) int64: tokens of each completion's prompt."""
        return self.prompt_offsets.diff()[self.prompts]

    @cached_property
    def num_targets(self) -> Tensor:
        """(S,) int64: sampled tokens of each completion, which are the targets of the loss."""
        written = torch.cat([self.mask.new_zeros(1, dtype=torch.int64), self.mask.cumsum(0)])
        return written[self.offsets].diff()

    def prompt_of(self, row: int) -> Tensor:
        start, end = self.prompt_offsets[self.prompts[row] : self.prompts[row] + 2]
        return self.prompt_ids[start:end]

    def tokens_of(self, row: int) -> Tensor:
        return self.token_ids[self.offsets[row] : self.offsets[row + 1]]

    def with_columns(self, **columns: Tensor | None) -> CompletionTable:
        """Add or replace columns of shape (N,); remove those that are None."""
        known = {**self.columns, **columns}
        return self._same_rows(columns={name: v for name, v in known.items() if v is not None})

    def with_facts(self, **facts: Tensor) -> CompletionTable:
        """Add or replace facts of shape (S, ...)."""
        return self._same_rows(facts={**self.facts, **facts})

    def with_objects(self, **objects: tuple[Any, ...]) -> CompletionTable:
        return self._same_rows(objects={**self.objects, **objects})

    def to(self, device: torch.device) -> CompletionTable:
        columns, inputs = (
            {name: values.to(device) for name, values in part.items()} for part in (self.columns, self.inputs)
        )
        return replace(self, columns=columns, inputs=inputs)

    def _same_rows(self, **changes: Any) -> CompletionTable:
        changed = replace(self, **changes)
        object.__setattr__(changed, "layouts", self.layouts)
        return changed

    def spread(self, per_completion: Tensor) -> Tensor:
        """Repeat a value per completion (S,) for each of its tokens: (N,)."""
        return per_completion.repeat_interleave(self.lengths.to(per_completion.device))

    def sums(self, per_token: Tensor) -> Tensor:
        """Sum a value per token (N,) over each completion's sampled tokens: (S,)."""
        rows = self.spread(torch.arange(len(self))).to(per_token.device)
        kept = torch.where(self.mask.to(per_token.device), per_token, 0).double()
        return kept.new_zeros(len(self)).index_add(0, rows, kept).to(per_token.dtype)

    def by_group(self, fact: str) -> Tensor:
        """Return a fact as (G, n, ...), for consecutive groups of n completions."""
        values, groups = self.facts[fact], self.num_groups
        return values.view(groups, len(self) // max(1, groups), *values.shape[1:])

    def select(self, rows: Tensor | Sequence[int]) -> CompletionTable:
        """Select completions and their prompts, in this order; groups keep their numbers."""
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
        """Select groups, in this order, and renumber them from 0."""
        wanted, order = torch.tensor([*groups], dtype=torch.int64), self.groups.argsort(stable=True)
        first, end = (torch.searchsorted(self.groups[order], wanted, right=right) for right in (False, True))
        sizes = end - first
        chosen = self.select(order[torch.from_numpy(ranges(first.numpy(), sizes.numpy()))])
        return replace(chosen, groups=torch.arange(len(wanted)).repeat_interleave(sizes))

    @staticmethod
    def join(tables: Sequence[CompletionTable]) -> CompletionTable:
        """Concatenate tables, which need the same columns, facts and inputs; groups are numbered on."""
        if len(tables) == 1:
            return tables[0]
        for what in ("columns", "facts", "inputs"):
            names = [{*getattr(table, what)} for table in tables]
            if lacking := sorted(set.union(*names) - set.intersection(*names)):
                raise ValueError(f"{what} {lacking}: only some completions have them; give them for all")

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(table, name) for table in tables])

        def shifted(name: str, sizes: Iterable[int]) -> Tensor:
            before = torch.tensor([0, *sizes][: len(tables)]).cumsum(0)
            return torch.cat([getattr(t, name) + start for t, start in zip(tables, before, strict=True)])

        def ends(name: str) -> Tensor:
            sizes = torch.cat([getattr(table, name).diff() for table in tables])
            return torch.from_numpy(offsets_of(sizes.numpy()))

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
            prompt_ids=joined("prompt_ids"),
            prompt_offsets=ends("prompt_offsets"),
            prompts=shifted("prompts", [len(t.prompt_offsets) - 1 for t in tables]),
            groups=shifted("groups", [t.num_groups for t in tables]),
            token_ids=joined("token_ids"),
            offsets=ends("offsets"),
            mask=joined("mask"),
            columns=by_name("columns"),
            facts=by_name("facts"),
            inputs={name: inputs(name) for name in tables[0].inputs},
            objects={name: objects(name) for name in dict.fromkeys(n for t in tables for n in t.objects)},
            logged=by_name("logged"),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return everything but the objects by name, for the exchange between ranks."""
        named = {f"{part}/{name}": v for part in PARTS for name, v in getattr(self, part).items()}
        return {name: getattr(self, name) for name in STRUCTURE} | named

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> CompletionTable:
        fields: dict[str, Any] = {name: tensors[name] for name in STRUCTURE} | {part: {} for part in PARTS}
        for name, values in tensors.items():
            part, _, rest = name.partition("/")
            if rest:
                fields[part][rest] = values
        return CompletionTable(**fields)


STRUCTURE = ("prompt_ids", "prompt_offsets", "prompts", "groups", "token_ids", "offsets", "mask")
PARTS = ("columns", "facts", "inputs", "logged")


def offsets_of(lengths: Sequence[int] | Integers) -> Integers:
    """Return where each of n consecutive ranges begins, and their end: (n + 1,)."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """Concatenate the ranges [start, start + length)."""
    before = offsets_of(lengths)
    return np.repeat(starts - before[:-1], lengths) + np.arange(before[-1])


def _flat(name: str, values: Iterable[Sequence[Any]], lengths: Integers, dtype: type) -> Any:
    listed = [*values]
    for row, (own, length) in enumerate(zip(listed, lengths.tolist(), strict=True)):
        if len(own) != length:
            raise ValueError(f"{name}[{row}] has {len(own)} entries for {length} tokens; give one for each")
    return np.fromiter(chain.from_iterable(listed), dtype, int(lengths.sum()))


def _of_inputs(
    values: Sequence[Integers], numbers: Sequence[int], prompts: Sequence[int], lengths: Integers
) -> Tensor:
    """Concatenate the values of all prompts, then of all completions; pad with `UNKNOWN`."""
    first = {number: row for row, number in reversed([*enumerate(numbers)])}
    spans = [(values[first[number]], 0, length) for number, length in enumerate(prompts)]
    for own, number, length in zip(values, numbers, lengths.tolist(), strict=True):
        spans.append((own, prompts[number], prompts[number] + length))
    joined = np.full((sum(end - start for _, start, end in spans), *values[0].shape[1:]), UNKNOWN, np.int16)
    place = 0
    for known, start, end in spans:
        part = known[start:end]
        joined[place : place + len(part)] = part
        place += end - start
    return torch.from_numpy(joined)
