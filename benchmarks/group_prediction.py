"""The largest group whose update fits undivided, as the memory planner sees it: no update is run."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_fast.config import TrainConfig

from .architectures import architecture_of, model_config
from .group_probe import Probe


def predict_group(probe: Probe, device: torch.device) -> int | None:
    """Completions of one prompt, in one forward and backward; None where not even two fit.

    Raises:
        ValueError: a model that the planner does not know.
    """
    from grpo_fast.plan.devices import device_budget
    from grpo_fast.plan.search import plan

    budget = device_budget()
    if probe.budget is not None:
        budget = replace(budget, total=probe.budget)
    config = TrainConfig.model_validate(
        {
            "model": {
                "path": probe.model,
                "dtype": probe.dtype,
                "device": device.type,
                "train_lm_head": not probe.options["freeze_head"],
                "gradient_checkpointing": probe.options["gradient_checkpointing"],
                "lora": probe.options["lora_rank"] and {"r": probe.options["lora_rank"]},
            },
            "dataset": {"source": "no data: only sizes are asked"},
            "rewards": [{"reward": "none"}],
            "prompts_per_step": 1,
            "rollout": {"engine": "transformers", "max_completion_length": probe.completion},
        }
    )
    found = plan(
        config,
        model_config(architecture_of(probe.model, probe.layers)),
        budget,
        prompt_length=probe.prompt,
        knobs=False,
    )
    return found.group_in_one_micro_batch
