"""How prompts are grouped, in which order they come, and how the weights of their rewards move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_fast.config.section import Fraction, Positive, PositiveInt, Section, one_of, words
from grpo_fast.objective.config import refuse_unread
from grpo_fast.objective.estimators import BASELINES, SCALES


class CriterionConfig(Section):
    """One of the likenesses that `groups.strategy: combined` adds up."""

    by: str = Field(
        description="`embedding`, `prefix`, `length`, `column:NAME`, or `module:function` giving a number or "
        "a vector for each prompt"
    )
    weight: Positive = Field(1.0, description="of its distance among all criteria")


Scale = Annotated[str, one_of(SCALES, "scale"), words(SCALES)]
Baseline = Annotated[str, one_of(BASELINES, "baseline"), words(BASELINES)]
LIKENESS = ("similarity_threshold", "embedding", "prefix_turns")
UNREAD_BY = {  # what a strategy does not read; a function of the user's own reads no likeness
    "prompt": (*LIKENESS, "min_group_size", "max_group_size"),
    "similarity": ("prefix_turns",),
    "prefix": ("similarity_threshold", "embedding"),
    "combined": (),
}


class GroupConfig(Section):
    """Whose completions share a baseline. A schedule of strategies is a list of `stages` overriding this."""

    strategy: str = Field(
        "prompt",
        description="`prompt`, `similarity`, `prefix`, `combined`, or `module:function` giving a key for "
        "each prompt",
    )
    similarity_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        0.4, description="cosine similarity that joins prompts; for combined criteria 1 - distance"
    )
    min_group_size: PositiveInt = Field(2, description="prompts; smaller groups fall apart")
    max_group_size: PositiveInt = Field(4, description="prompts that share a baseline at most")
    embedding: str = Field("tfidf", description="`tfidf`, or `module:function` from N texts to N vectors")
    prefix_turns: PositiveInt | None = Field(
        None, description="turns that must agree; null: all but the last"
    )
    criteria: list[CriterionConfig] = Field([], description="for strategy: combined")

    @property
    def shares_baselines(self) -> bool:
        """Whether completions of different prompts may share a baseline."""
        return self.strategy != "prompt"

    @model_validator(mode="after")
    def _consistent(self) -> GroupConfig:
        if ":" not in self.strategy and self.strategy not in UNREAD_BY:
            raise ValueError(
                f"groups.strategy = {self.strategy!r} is unknown; choose one of {', '.join(UNREAD_BY)}, or "
                "give your own function as 'module:function'"
            )
        unread = UNREAD_BY.get(self.strategy, LIKENESS)
        refuse_unread(self, unread, f"by groups.strategy = {self.strategy!r}")
        if self.min_group_size > self.max_group_size:
            raise ValueError(
                f"groups.min_group_size = {self.min_group_size} exceeds max_group_size = "
                f"{self.max_group_size}; raise max_group_size"
            )
        if (self.strategy == "combined") != bool(self.criteria):
            raise ValueError(
                "groups.criteria is empty; strategy = 'combined' needs one at least, such as {by: embedding}"
            )
        return self


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
        description="whose standard deviation of rewards divides advantages; whiten: minus their mean over "
        "the batch's tokens, divided by their deviation there (REINFORCE++-baseline)",
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
