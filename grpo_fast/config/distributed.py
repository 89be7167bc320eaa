"""How several ranks divide a run: the section `distributed`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_fast.config.section import Positive, Section


class DistributedConfig(Section):
    """What `torchrun` starts: each rank takes whole groups. Without torchrun nothing of it is read."""

    mode: Literal["auto", "replicate", "shard"] = Field(
        "auto",
        description="replicate: whole weights on every rank, gradients, masters and moments sharded; shard: "
        "weights too (FSDP2); auto: by the plan, on a CPU replicate",
    )
    timeout: Positive = Field(
        30.0, description="minutes that a rank waits for the others before the run stops with an error"
    )
    heartbeat_timeout: Annotated[float, Field(ge=5)] = Field(
        300.0,
        description="seconds without a sign of life after which a rank is lost; torchrun notices a process "
        "that died at once",
    )
