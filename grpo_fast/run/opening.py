"""The lines at a run's start: what is trained, on what and where."""

from __future__ import annotations

import torch

from grpo_fast.config.methods import describe_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.stages import resolve_stages
from grpo_fast.loop.algorithm import Algorithm


def opening_lines(config: TrainConfig, trainer: Algorithm) -> list[str]:
    """Return a few lines that begin with a name: model, data, the algorithm's own, method and run."""
    policy, world, dataset, every = (
        trainer.policy,
        trainer.world,
        trainer.prompts.dataset,
        config.checkpoint.every,
    )
    sizes = [
        sum(p.numel() for p in part) for part in (policy.model.parameters(), policy.trainable().values())
    ]
    cuda = policy.device.type == "cuda"
    where = torch.cuda.get_device_name(policy.device) if cuda else f"CPU, {torch.get_num_threads()} thread(s)"
    if world.size > 1:
        where = f"{world.size} ranks ({config.distributed.mode}), each on {where}"
    dtype = str(policy.base_model.dtype).removeprefix("torch.")
    lines = {
        "model": f"{config.model.path}: {sizes[0]:,} parameters, {sizes[1]:,} trained; {dtype} on {where}",
        "data": getattr(dataset, "described", f"{len(dataset):,} prompts"),
    }
    if trainer.held_out:
        scored = (
            f"scored every {config.evaluation.every} steps"
            if config.evaluation.every
            else "scored before and after"
        )
        lines["data"] += (
            f"; held out, {scored}: {getattr(trainer.held_out, 'described', len(trainer.held_out))}"
        )
    lines |= trainer.described()
    stages = resolve_stages(config)
    methods = dict.fromkeys(text for stage in stages if (text := describe_method(stage.config)))
    lines |= {"method": "; ".join(methods)} if methods else {}
    saves = f"a checkpoint every {every} steps and at the end" if every else "one checkpoint, at the end"
    named = ", ".join(stage.name for stage in stages if stage.name)
    lines["run"] = (
        f"{config.output_dir}: {config.max_steps:,} steps{named and f' in the stages {named}'}; {saves}"
    )
    return [f"{name:<7} {text}" for name, text in lines.items()]
