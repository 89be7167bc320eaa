"""Choose the prompts of a step, and those among them that share a baseline."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.config.groups import SCORED, CurriculumConfig, GroupConfig
from grpo_fast.config.lookup import load_callable
from grpo_fast.config.section import short
from grpo_fast.data import Prompt, PromptDataset, PromptSampler
from grpo_fast.data.table import CompletionTable
from grpo_fast.groups import formation
from grpo_fast.groups.criteria import prompt_values, scored_values, texts_of, tfidf, weighted_distance
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import PromptGroups, cut
from grpo_fast.objective.types import present


def make_sampler(
    dataset: PromptDataset,
    batch_size: int,
    groups: GroupConfig,
    curriculum: CurriculumConfig | None,
    reward_names: Sequence[str],
    *,
    seed: int,
) -> PromptSampler:
    """Make the sampler of `groups` and `curriculum`; raise ValueError if they do not fit the dataset."""
    if curriculum is not None:
        return DifficultySampler(dataset, batch_size, curriculum, reward_names, seed)
    if groups.shares_baselines:
        return GroupSampler(dataset, batch_size, groups, seed, 2 * len(dataset.config.examples))
    return PromptSampler(dataset, batch_size, seed)


class GroupSampler(PromptSampler):
    """Sample shuffled epochs in which the prompts of a group are consecutive.

    Each prompt comes once per epoch. If a batch ends within a group, each part shares its own baseline. A
    phase that groups after scoring samples prompts individually. A new phase reorders the rest of the epoch.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        batch_size: int,
        config: GroupConfig,
        seed: int = 0,
        example_turns: int = 0,
    ) -> None:
        """Form the groups of every phase; arguments and errors as for `form_groups`."""
        super().__init__(dataset, batch_size, seed)
        formation.check_sizes(dataset, config)
        self.config, self.phases = config, config.by_phase()
        paths = {phase.strategy for phase in self.phases if ":" in phase.strategy}
        self.functions = {path: load_callable(path, "groups.strategy") for path in sorted(paths)}
        self.asked = [
            formation.asked_after_scoring(self.functions[p.strategy], p.strategy)
            if p.strategy in paths
            else []
            for p in self.phases
        ]
        named = [criterion.function for criterion in config.criteria if criterion.function]
        self.functions |= {path: load_callable(path, "groups.criteria.function") for path in named}
        self.reads_texts = bool(named) or any("completions" in asked for asked in self.asked)
        needed = {c.by: None for c in config.criteria if c.by not in SCORED}
        embeds = config.embedding != "tfidf" or any("embeddings" in asked for asked in self.asked)
        if embeds or any(phase.strategy == "semantic" for phase in self.phases):
            needed["embedding"] = None
        self.values = {by: prompt_values(dataset, by, config, example_turns) for by in needed}
        self._position_of = {prompt.index: position for position, prompt in enumerate(dataset)}
        self.example_turns = example_turns
        self.formed = [self._form(index) for index in range(len(self.phases))]
        self.step = self.total_steps = 0
        self._use(0)

    def _form(self, index: int) -> PromptGroups:
        phase = self.phases[index]
        if phase.reads_rewards or self.asked[index]:
            return [[position] for position in range(len(self.dataset))]
        distance = None
        if phase.strategy == "semantic":
            distance = weighted_distance([(1.0, self.values["embedding"])])
        elif phase.strategy == "combined":
            distance = weighted_distance([(c.weight, self.values[c.by]) for c in phase.criteria])
        return formation.form_groups(self.dataset, phase, distance, self.example_turns)

    def _use(self, phase: int) -> None:
        self.phase, self.groups = phase, self.formed[phase]
        self.after_scoring = self.phases[phase].reads_rewards or bool(self.asked[phase])
        self._group_of = {position: number for number, group in enumerate(self.groups) for position in group}

    def begin(self, step: int, total_steps: int) -> None:
        self.step, self.total_steps = step, total_steps
        # Rounded, because 0.1 x 30 is more than 3 in floating point.
        ends = [round(phase.until * total_steps, 9) for phase in self.config.phases[:-1]]
        if (due := bisect_right(ends, step)) == self.phase:
            return
        self._use(due)
        epoch, place = divmod(self.drawn, len(self.dataset))
        if epoch == self._epoch:
            self._order[place:] = self._arranged(f"{self.seed}/{epoch}/{due}", {*self._order[place:]})

    def baseline_groups(self, prompts: Sequence[Prompt], table: CompletionTable | None) -> list[int]:
        """Return the group number of each prompt of the last batch; a phase may read the scored table."""
        places = self._places(prompts)
        if not self.after_scoring:
            return [self._group_of[place] for place in places]
        groups = self._form_scored(prompts, torch.tensor(places), present(table))
        numbers = {position: number for number, group in enumerate(groups) for position in group}
        return [self.drawn + numbers[position] for position in range(len(prompts))]  # unique over batches

    def _places(self, prompts: Sequence[Prompt]) -> list[int]:
        return [self._position_of[prompt.index] for prompt in prompts]

    def _form_scored(self, prompts: Sequence[Prompt], places: Tensor, table: CompletionTable) -> PromptGroups:
        config, rewards = self.phases[self.phase], table.by_group("reward")
        if asked := self.asked[self.phase]:
            given: dict[str, Callable[[], Any]] = {
                "prompts": lambda: prompts,
                "completions": lambda: texts_of(table),
                "step": lambda: self.step,
                "total_steps": lambda: self.total_steps,
                "embeddings": lambda: self.embeddings(prompts),
                "rewards": lambda: rewards.clone(),
                "batch_size": lambda: len(prompts),
                "group_size": lambda: config.max_group_size,
            }
            found = self.functions[config.strategy](**{name: given[name]() for name in asked})
            return cut(prompts, config, keys=formation.read_keys(found, len(prompts), config))
        means = rewards.nanmean(1)
        order = means.isfinite().nonzero()[:, 0].tolist()  # prompts without a reward stay alone
        if config.strategy == "random":
            random.Random(f"{self.seed}/{self.drawn}").shuffle(order)
        elif config.strategy == "performance":
            order.sort(key=means.tolist().__getitem__)
        elif order:
            row_of = torch.zeros(len(prompts), dtype=torch.int64)
            row_of[order] = torch.arange(len(order))
            known = [
                scored_values(table, c, order, self.functions)
                if c.by in SCORED
                else self.values[c.by][places[order]]
                for c in config.criteria
            ]
            weights = [criterion.weight for criterion in config.criteria]
            among = weighted_distance([*zip(weights, known, strict=True)])
            return cut(prompts, config, order, distance=lambda a, b: among(row_of[a], row_of[b]))
        return cut(prompts, config, order)

    def embeddings(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return unit vectors (P, D): the strategy's, or TF-IDF of these prompts."""
        if "embedding" in self.values:
            return self.values["embedding"][self._places(prompts)].view(len(prompts), -1)
        return tfidf([prompt.token_ids for prompt in prompts])

    def known_of(self, prompts: Sequence[Prompt]) -> list[dict[str, str]]:
        """Return the columns and the key that each prompt is grouped by, to display."""
        phase = self.phases[self.phase]
        names = [self.config.sizes()[0], *(c.by.removeprefix("column:") for c in self.config.criteria)]
        known = [{name: short(p.columns[name]) for name in names if name in p.columns} for p in prompts]
        if phase.strategy == "prefix" or (":" in phase.strategy and not self.after_scoring):
            keys = formation.prompt_keys(self.dataset, phase, self.example_turns)
            for own, place in zip(known, self._places(prompts), strict=True):
                own["key"] = short(keys[place])
        return known

    def metrics(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], table: CompletionTable | None
    ) -> dict[str, float]:
        found = formation.describe_groups(numbers, self.embeddings(prompts), table)
        return found | ({"groups/phase": self.phase} if self.config.phases else {})

    def state_dict(self) -> dict[str, Any]:
        # The groups are saved, because another machine's rounding may form others.
        state = super().state_dict() | {"groups": self.formed[0]}
        if self.config.phases:
            state |= {"later": self.formed[1:], "phase": self.phase, "order": [self._epoch, self._order]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.formed = [state["groups"], *state.get("later", ())]
        self._use(state.get("phase", 0))
        self._epoch, self._order = state.get("order", (-1, []))

    def _order_of(self, epoch: int) -> list[int]:
        return self._arranged(f"{self.seed}/{epoch}", {*range(len(self.dataset))})

    def _arranged(self, name: str, positions: set[int]) -> list[int]:
        """Order positions by group, with groups and their members shuffled."""
        rng = random.Random(name)
        groups = [[position for position in group if position in positions] for group in self.groups]
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        return [position for group in groups for position in group]
