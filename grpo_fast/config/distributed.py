"""The section `distributed`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_fast.config.section import Positive, Section


class DistributedConfig(Section):
    """Training on several ranks of `torchrun`, each with whole groups. Not read on a single process."""

    mode: Literal["auto", "replicate", "shard"] = Field(
        "auto",
        description="replicate: each rank has all weights, and a shard of gradients, masters and moments; "
        "shard: weights are sharded, too (FSDP2); auto: by the plan, on a CPU replicate",
    )
    timeout: Positive = Field(30.0, description="minutes to wait for other ranks before the run fails")
    heartbeat_timeout: Annotated[float, Field(ge=5)] = Field(
        300.0,
        description="seconds without a heartbeat after which a rank is lost; an exit is noticed at once",
    )
