"""The sections `groups`, `curriculum`, `adaptive_weights` and `advantage`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from grpo_fast.config.section import Fraction, OpenShare, Positive, PositiveInt, Section, Share, one_of, words
from grpo_fast.objective.config import refuse_unread
from grpo_fast.objective.estimators import BASELINES, SCALES

SCORED = ("reward", "diversity")  # criteria that are known after scoring
ALIASES = {"similarity": "semantic"}
_SIZES = {"min_group_size", "max_group_size", "size_by"}
READS = {  # the keys of `groups` that a strategy reads
    "prompt": set[str](),
    "random": _SIZES,
    "semantic": {*_SIZES, "similarity_threshold", "embedding"},
    "performance": _SIZES,
    "combined": {*_SIZES, "similarity_threshold", "embedding", "prefix_turns", "criteria"},
    "prefix": {*_SIZES, "prefix_turns"},
}
_NEEDED = {  # by a strategy: a key that must not be empty, with an example
    "adaptive": ("phases", "[{until: 0.5, strategy: random}, {until: 1.0, strategy: semantic}]"),
    "combined": ("criteria", "[{by: embedding}]"),
}


def _known(strategy: str) -> str:
    if ":" not in strategy and strategy not in {*READS, *ALIASES, "adaptive"}:
        raise ValueError(f"is unknown; choose one of {', '.join(READS)}, adaptive, or a 'module:function'")
    return ALIASES.get(strategy, strategy)


def _with_text_keys(sizes: Any) -> Any:
    """Make keys strings, since YAML reads some values of a column as numbers."""
    return {str(key): size for key, size in sizes.items()} if isinstance(sizes, dict) else sizes


Strategy = Annotated[str, AfterValidator(_known)]
Scale = Annotated[str, one_of(SCALES, "scale"), words(SCALES)]
Baseline = Annotated[str, one_of(BASELINES, "baseline"), words(BASELINES)]


class CriterionConfig(Section):
    """A distance between prompts, one of the sum in `groups.strategy: combined`."""

    by: str = Field(
        description="`embedding`, `prefix`, `length`, `column:NAME`, `reward` (mean of a prompt's "
        "completions), `diversity` (of them), or `module:function` from prompts to a number or a vector for "
        "each",
    )
    weight: Positive = Field(1.0, description="weight in the sum")
    function: str | None = Field(
        None,
        description="for by: diversity, `module:function` from the texts of a prompt's completions to a "
        "number; null: share of distinct token bigrams",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CriterionConfig:
        if self.by != "diversity":
            refuse_unread(self, ["function"], f"by criterion by = {self.by!r}")
        return self


class PhaseConfig(Section):
    """A phase of `groups.strategy: adaptive`."""

    until: Share = Field(description="end of the phase, as a share of max_steps")
    strategy: Strategy = Field(description="as `groups.strategy`, except `adaptive`")


class GroupConfig(Section):
    """Which prompts share a baseline."""

    strategy: Strategy = Field(
        "prompt",
        description="`prompt`, `random`, `semantic` (alias `similarity`), `performance`, `combined`, "
        "`adaptive`, `prefix`, or `module:function`: of the prompts before sampling, or after scoring of any "
        "of step, total_steps, embeddings, rewards and completions",
    )
    similarity_threshold: Share = Field(
        0.4, description="smallest cosine similarity; for combined, 1 - distance"
    )
    min_group_size: PositiveInt = Field(2, description="prompts; smaller groups are split into prompts")
    max_group_size: PositiveInt = Field(4, description="largest number of prompts that share a baseline")
    size_by: Annotated[dict[str, str | int], BeforeValidator(_with_text_keys)] | None = Field(
        None,
        description="max_group_size by the value of a column, as `{column: domain, dialogue: 4}`; prompts "
        "with different values share no baseline",
    )
    embedding: str = Field("tfidf", description="`tfidf`, or `module:function` from N texts to N vectors")
    prefix_turns: PositiveInt | None = Field(None, description="turns that must agree; null: all but last")
    criteria: list[CriterionConfig] = Field([], description="for strategy: combined")
    phases: list[PhaseConfig] = Field([], description="for strategy: adaptive, in order; the last until: 1.0")

    @property
    def shares_baselines(self) -> bool:
        """Whether completions of different prompts may share a baseline."""
        return self.strategy != "prompt"

    @property
    def reads_rewards(self) -> bool:
        """Whether a built-in strategy forms groups after scoring; a custom one's signature decides."""
        by = {criterion.by for criterion in self.criteria}
        return self.strategy in ("random", "performance") or (
            self.strategy == "combined" and not by.isdisjoint(SCORED)
        )

    @property
    def largest(self) -> int:
        """The largest number of prompts in a group."""
        return max(self.max_group_size * self.shares_baselines, *self.sizes()[1].values(), 0)

    def by_phase(self) -> list[GroupConfig]:
        """Return the settings of each phase, or of the whole run."""
        return [self.model_copy(update={"strategy": p.strategy, "phases": []}) for p in self.phases] or [self]

    def sizes(self) -> tuple[str, dict[str, int]]:
        """Return the column of `size_by`, and the largest group by its value."""
        sizes = {value: size for value, size in (self.size_by or {}).items() if isinstance(size, int)}
        return str((self.size_by or {}).get("column")), sizes

    @model_validator(mode="after")
    def _consistent(self) -> GroupConfig:
        until = [phase.until for phase in self.phases]
        strategies = [phase.strategy for phase in self.phases] or [self.strategy]
        reads = {"strategy"} | ({"phases"} if self.strategy == "adaptive" else set())
        reads = reads.union(*(READS.get(name, {*_SIZES, "embedding"}) for name in strategies))
        if "adaptive" in strategies and self.phases:
            raise ValueError("groups.phases: a phase has strategy = 'adaptive'; give it another one")
        if until and (sorted({*until}) != until or until[-1] != 1):
            raise ValueError(f"groups.phases has until = {until}: shares must rise, and the last must be 1.0")
        for strategy, (name, example) in _NEEDED.items():
            if name not in reads and getattr(self, name):
                remedy = f"set strategy = {strategy!r}, or leave it out"
                raise ValueError(
                    f"groups.{name} is not read by groups.strategy = {self.strategy!r}; {remedy}"
                )
            if strategy in (self.strategy, *strategies) and not getattr(self, name):
                raise ValueError(
                    f"groups.{name} is empty; strategy = {strategy!r} needs it, such as {example}"
                )
        unread = [name for name in type(self).model_fields if name not in reads]
        refuse_unread(self, unread, f"by groups.strategy = {self.strategy!r}", "groups")
        if self.min_group_size > self.max_group_size:
            raise ValueError(
                f"groups.min_group_size = {self.min_group_size} exceeds max_group_size = "
                f"{self.max_group_size}; raise max_group_size"
            )
        if self.size_by is not None:
            self._check_sizes(self.size_by)
        return self

    def _check_sizes(self, size_by: dict[str, str | int]) -> None:
        if not isinstance(size_by.get("column"), str) or len(size_by) < 2:
            raise ValueError(
                f"groups.size_by = {size_by}: give a column and the size of at least one of its values, as "
                "{column: domain, dialogue: 4}"
            )
        for value, size in size_by.items():
            if value != "column" and (isinstance(size, str) or (size != 1 and size < self.min_group_size)):
                raise ValueError(
                    f"groups.size_by.{value} = {size!r}: must be 1 (no shared baseline), or at least "
                    f"min_group_size = {self.min_group_size}"
                )


class CurriculumConfig(Section):
    """Sample prompts by difficulty: buckets of running pass rates, each with a share of the batch."""

    bucket_edges: Annotated[list[OpenShare], Field(min_length=1)] = Field(
        [0.2, 0.8], description="pass rates between buckets, rising"
    )
    bucket_weights: list[Positive] = Field([1.0, 2.0, 1.0], description="share of each bucket, hardest first")
    smoothing: Share = Field(0.5, description="weight of a new observation in a running pass rate")
    initial_pass_rate: Fraction = Field(0.5, description="pass rate of prompts that were not sampled yet")
    pass_rate_column: str | None = Field(None, description="column with initial pass rates")
    threshold: float = Field(1.0, description="reward from which a completion passes")
    reward: str | None = Field(None, description="the reward that is compared; null: the weighted sum")

    @model_validator(mode="after")
    def _consistent(self) -> CurriculumConfig:
        edges, weights = self.bucket_edges, self.bucket_weights
        if sorted(set(edges)) != edges:
            raise ValueError(f"curriculum.bucket_edges = {edges} must rise; sort them and drop repeats")
        if len(weights) != len(edges) + 1:
            raise ValueError(
                f"curriculum.bucket_weights = {weights}: bucket_edges = {edges} make {len(edges) + 1} "
                "buckets; give one weight for each"
            )
        return self


class AdaptiveWeightsConfig(Section):
    """Reward weights that change: each is its configured weight times a bounded factor."""

    method: Literal["target"] = Field("target", description="raises the weight of a reward below its target")
    targets: Annotated[dict[str, float], Field(min_length=1)] = Field(description="reward -> target mean")
    rate: Positive = Field(0.05, description="change of the factor per step")
    smoothing: Share = Field(0.1, description="weight of a new step in the running mean")
    min_factor: Share = Field(0.2, description="smallest factor")
    max_factor: Annotated[float, Field(ge=1)] = Field(5.0, description="largest factor")


class AdvantageConfig(Section):
    """How the rewards of a group become advantages, and which completions train."""

    scale_rewards: Scale = Field(
        "group",
        description="standard deviation of rewards that divides advantages; mean: divide by the group's mean "
        "reward, with rewards of at least 0 (MaxRL); whiten: normalize over the batch's tokens "
        "(REINFORCE++-baseline)",
    )
    baseline: Baseline = Field(
        "mean", description="subtracted from a reward: the group's mean, or the mean of the others (RLOO)"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="normalize_then_sum normalizes each reward before the weighted sum (GDPO)",
    )
    rescale_flat_groups: bool = Field(
        False,
        description="multiply advantages by B / (B - M) for M of B groups with zero reward variance (GPG)",
    )
    skip_flat_groups: bool | None = Field(
        None,
        description="leave groups with zero reward variance out of the update, including KL and entropy "
        "terms; null: if that does not change the result",
    )
    dynamic_sampling: bool = Field(False, description="sample until all groups of the batch have variance")
    max_draws: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="largest number of batches that dynamic_sampling samples for a step"
    )
    soft_overlong: Share | None = Field(
        None,
        description="last share of the length limit, over which a length penalty grows to 1 (DAPO); null: "
        "none",
    )
    mask_truncated: bool = Field(False, description="leave truncated completions out of the loss")
    function: str | None = Field(
        None,
        description="custom advantages, `module:function`: (list[Group], rewards (G, n)) -> a number for "
        "each completion, or for each of its tokens",
    )

    @model_validator(mode="after")
    def _consistent(self) -> AdvantageConfig:
        aggregation = "advantage.multi_objective_aggregation = 'normalize_then_sum'"
        if self.scales_parts and (self.scale_rewards, self.baseline) != ("group", "mean"):
            raise ValueError(
                f"{aggregation} (GDPO) uses a group's mean and deviation: leave out baseline = "
                f"{self.baseline!r} and scale_rewards = {self.scale_rewards!r}, or set sum_then_normalize"
            )
        if self.scales_parts and self.soft_overlong is not None:
            raise ValueError(
                f"advantage.soft_overlong = {self.soft_overlong} loses its scale by {aggregation}: give the "
                "reward soft_overlong a weight, or set sum_then_normalize"
            )
        return self

    @property
    def scales_parts(self) -> bool:
        """Whether each reward is normalized separately."""
        return self.multi_objective_aggregation == "normalize_then_sum"
