"""How prompts are grouped, in which order they come, and how the weights of their rewards move."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from grpo_fast.config.section import Fraction, Positive, PositiveInt, Section, one_of, words
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


def _known(strategy: str) -> str:
    if ":" not in strategy and strategy not in {*READS, *ALIASES, "adaptive"}:
        raise ValueError(
            f"is unknown; choose one of {', '.join(READS)}, adaptive, or give your own function as "
            "'module:function'"
        )
    return ALIASES.get(strategy, strategy)


def _with_text_keys(sizes: Any) -> Any:
    """Values of a column may be numbers, which YAML reads as numbers."""
    return {str(key): size for key, size in sizes.items()} if isinstance(sizes, dict) else sizes


Strategy = Annotated[str, AfterValidator(_known)]
Scale = Annotated[str, one_of(SCALES, "scale"), words(SCALES)]
Baseline = Annotated[str, one_of(BASELINES, "baseline"), words(BASELINES)]


class CriterionConfig(Section):
    """One of the distances between prompts that `groups.strategy: combined` adds up."""

    by: str = Field(
        description="`embedding`, `prefix`, `length`, `column:NAME`, `reward` (mean of a prompt's "
        "completions), `diversity` (of these), or `module:function` from prompts to a number or a vector each"
    )
    weight: Positive = Field(1.0, description="of its distance among all criteria")
    function: str | None = Field(
        None,
        description="for by: diversity, `module:function` from the texts of one prompt's completions to a "
        "number; null: distinct bigrams of tokens over all",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CriterionConfig:
        if self.by != "diversity":
            refuse_unread(self, ["function"], f"by criterion by = {self.by!r}")
        return self


class PhaseConfig(Section):
    """A stretch of the run with one strategy, for `groups.strategy: adaptive`."""

    until: Annotated[float, Field(gt=0, le=1)] = Field(description="share of max_steps at which it ends")
    strategy: Strategy = Field(description="as `groups.strategy`, without `adaptive`")


class GroupConfig(Section):
    """Whose completions share a baseline."""

    strategy: Strategy = Field(
        "prompt",
        description="`prompt`, `random`, `semantic` (alias `similarity`), `performance`, `combined`, "
        "`adaptive`, `prefix`, or `module:function`: of the prompts before they are sampled, or of any of "
        "step, total_steps, embeddings, rewards and completions after scoring",
    )
    similarity_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        0.4, description="cosine similarity that joins prompts; for combined criteria 1 - distance"
    )
    min_group_size: PositiveInt = Field(2, description="prompts; smaller groups fall apart")
    max_group_size: PositiveInt = Field(4, description="prompts that share a baseline at most")
    size_by: Annotated[dict[str, str | int], BeforeValidator(_with_text_keys)] | None = Field(
        None,
        description="max_group_size by the value of a column, as `{column: domain, dialogue: 4}`; prompts of "
        "different values share no baseline",
    )
    embedding: str = Field("tfidf", description="`tfidf`, or `module:function` from N texts to N vectors")
    prefix_turns: PositiveInt | None = Field(
        None, description="turns that must agree; null: all but the last"
    )
    criteria: list[CriterionConfig] = Field([], description="for strategy: combined")
    phases: list[PhaseConfig] = Field([], description="for strategy: adaptive, in order; the last until: 1.0")

    @property
    def shares_baselines(self) -> bool:
        """Whether completions of different prompts may share a baseline."""
        return self.strategy != "prompt"

    @property
    def reads_rewards(self) -> bool:
        """Whether a strategy of ours forms groups after scoring; the signature says it of a custom one."""
        by = {criterion.by for criterion in self.criteria}
        return self.strategy in ("random", "performance") or (
            self.strategy == "combined" and not by.isdisjoint(SCORED)
        )

    @property
    def largest(self) -> int:
        """The most prompts of one group."""
        return max(self.max_group_size * self.shares_baselines, *self.sizes()[1].values(), 0)

    def by_phase(self) -> list[GroupConfig]:
        """The settings of each phase; of the whole run where the strategy is not adaptive."""
        return [self.model_copy(update={"strategy": p.strategy, "phases": []}) for p in self.phases] or [self]

    def sizes(self) -> tuple[str, dict[str, int]]:
        """The column of `size_by`, and the largest group by its value."""
        sizes = {value: size for value, size in (self.size_by or {}).items() if isinstance(size, int)}
        return str((self.size_by or {}).get("column")), sizes

    @model_validator(mode="after")
    def _consistent(self) -> GroupConfig:
        steps = [phase.until for phase in self.phases]
        if "adaptive" in (phase.strategy for phase in self.phases):
            raise ValueError("groups.phases has strategy = 'adaptive' in it; give each phase another one")
        if steps and (sorted({*steps}) != steps or steps[-1] != 1):
            raise ValueError(
                f"groups.phases has until = {steps}: shares of the run must rise, and the last must be 1.0"
            )
        strategies = [phase.strategy for phase in self.phases] or [self.strategy]
        reads = set.union(*(READS.get(name, {*_SIZES, "embedding"}) for name in strategies))
        reads |= {"strategy"} | ({"phases"} if self.strategy == "adaptive" else set())
        for name, strategy, example in (
            ("phases", "adaptive", "[{until: 0.5, strategy: random}, {until: 1.0, strategy: semantic}]"),
            ("criteria", "combined", "[{by: embedding}]"),
        ):
            if strategy in (self.strategy, *strategies) and not getattr(self, name):
                raise ValueError(
                    f"groups.{name} is empty; strategy = {strategy!r} needs one at least, such as {example}"
                )
            if name not in reads and getattr(self, name):
                raise ValueError(
                    f"groups.{name} is not read by groups.strategy = {self.strategy!r}; set strategy = "
                    f"{strategy!r}, or leave it out"
                )
        unread = [name for name in type(self).model_fields if name not in reads]
        refuse_unread(self, unread, f"by groups.strategy = {self.strategy!r}")
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
                    f"groups.size_by.{value} = {size!r}: must be 1, which keeps prompts apart, or at least "
                    f"min_group_size = {self.min_group_size}"
                )


class CurriculumConfig(Section):
    """Prompts drawn by difficulty: running pass rates fall into buckets, each with its share of a batch."""

    bucket_edges: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=1)] = Field(
        [0.2, 0.8], description="pass rates that part the buckets, rising"
    )
    bucket_weights: list[Positive] = Field(
        [1.0, 2.0, 1.0],
        description="share of each bucket, hardest first; positive, so that no prompt is lost",
    )
    smoothing: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="weight of the newest observation in a prompt's running pass rate"
    )
    initial_pass_rate: Fraction = Field(0.5, description="of prompts not drawn yet")
    pass_rate_column: str | None = Field(None, description="a column with known pass rates, to start from")
    threshold: float = Field(1.0, description="the reward from which a completion passes")
    reward: str | None = Field(None, description="which reward decides; null: the weighted sum")

    @model_validator(mode="after")
    def _consistent(self) -> CurriculumConfig:
        edges = self.bucket_edges
        if sorted(set(edges)) != edges:
            raise ValueError(f"curriculum.bucket_edges = {edges} must rise; order them and drop repeats")
        if len(self.bucket_weights) != len(edges) + 1:
            raise ValueError(
                f"curriculum.bucket_weights has {len(self.bucket_weights)} entries for the {len(edges) + 1} "
                f"buckets that bucket_edges = {edges} make; give one each"
            )
        return self


class AdaptiveWeightsConfig(Section):
    """Reward weights that move: each is its configured weight times a factor within bounds."""

    method: Literal["target"] = Field("target", description="more weight below a wanted mean")
    targets: Annotated[dict[str, float], Field(min_length=1)] = Field(description="reward -> mean wanted")
    rate: Positive = Field(0.05, description="how fast factors follow, a step")
    smoothing: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="weight of the newest step in the running mean"
    )
    min_factor: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="of the configured weight, at least"
    )
    max_factor: Annotated[float, Field(ge=1)] = Field(5.0, description="of the configured weight, at most")


class AdvantageConfig(Section):
    """How the rewards of a group become advantages, and which completions train."""

    scale_rewards: Scale = Field(
        "group",
        description="whose standard deviation of rewards divides advantages; mean: the group's mean reward "
        "divides them, and no reward may be below 0 (MaxRL); whiten: minus their mean over the batch's "
        "tokens, divided by their deviation there (REINFORCE++-baseline)",
    )
    baseline: Baseline = Field(
        "mean", description="what is taken from a reward: the group's mean, or the mean of the others (RLOO)"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="normalize_then_sum scales each reward by itself before they are added (GDPO)",
    )
    rescale_flat_groups: bool = Field(
        False, description="advantages times B / (B - M), where M of a step's B groups are flat (GPG)"
    )
    skip_flat_groups: bool | None = Field(
        None,
        description="groups whose rewards are all equal leave the update, KL and entropy terms too; null: "
        "where that changes nothing but the cost",
    )
    dynamic_sampling: bool = Field(False, description="draw until the batch is full of groups with spread")
    max_draws: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="batches that dynamic sampling may draw for one step"
    )
    soft_overlong: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="the last share of the length limit, over which a completion's reward falls by up to 1 "
        "(DAPO); null: by nothing",
    )
    mask_truncated: bool = Field(False, description="truncated completions leave the loss")
    function: str | None = Field(
        None,
        description="`module:function` of your own: (list[Group], rewards (G, n)) -> a number for each "
        "completion, or one for each of its tokens",
    )

    @model_validator(mode="after")
    def _consistent(self) -> AdvantageConfig:
        if self.scales_parts and (self.scale_rewards, self.baseline) != ("group", "mean"):
            raise ValueError(
                "advantage.multi_objective_aggregation = 'normalize_then_sum' is GDPO, which takes a group's "
                f"mean and deviation, not baseline = {self.baseline!r} and scale_rewards = "
                f"{self.scale_rewards!r}; leave them out, or set sum_then_normalize"
            )
        if self.scales_parts and self.soft_overlong is not None:
            raise ValueError(
                f"advantage.soft_overlong = {self.soft_overlong} takes at most 1 from a reward, and "
                "advantage.multi_objective_aggregation = 'normalize_then_sum' gives each part one deviation, "
                "however small: give the reward soft_overlong a weight, or set sum_then_normalize"
            )
        return self

    @property
    def scales_parts(self) -> bool:
        """Whether each reward is scaled by itself."""
        return self.multi_objective_aggregation == "normalize_then_sum"
