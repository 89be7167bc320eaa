"""The first lines of a run: the model, the data, the groups, the method and the schedule."""

from __future__ import annotations

import torch

from grpo_fast.config.methods import describe_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import plural
from grpo_fast.config.stages import resolve_stages
from grpo_fast.loop.algorithm import Algorithm


def opening_lines(config: TrainConfig, trainer: Algorithm) -> list[str]:
    """Return the lines, each after its name: model, data, the algorithm's own, method and run."""
    policy, world, dataset = trainer.policy, trainer.world, trainer.prompts.dataset
    total = sum(p.numel() for p in policy.model.parameters())
    trained = sum(p.numel() for p in policy.trainable().values())
    where = f"CPU, {plural(torch.get_num_threads(), 'thread')}"
    if policy.device.type == "cuda":
        where = torch.cuda.get_device_name(policy.device)
    if world.size > 1:
        where = f"{world.size} ranks ({config.distributed.mode}), each on {where}"
    dtype = str(policy.base_model.dtype).removeprefix("torch.")
    data = getattr(dataset, "described", plural(len(dataset), "prompt"))
    if trainer.held_out:
        data += f"; held out, {_evaluations(config, trainer)}"
    stages = resolve_stages(config)
    methods = dict.fromkeys(text for stage in stages if (text := describe_method(stage.config)))
    every = config.checkpoint.every
    saves = (
        f"a checkpoint every {plural(every, 'step')} and at the end"
        if every
        else "one checkpoint, at the end"
    )
    names = ", ".join(stage.name for stage in stages if stage.name)
    named = f" in the stages {names}" if names else ""
    lines = {
        "model": f"{config.model.path}: {total:,} parameters, {trained:,} trained; {dtype} on {where}",
        "data": data,
        **trainer.described(),
        **({"method": "; ".join(methods)} if methods else {}),
        "run": f"{config.output_dir}: {plural(config.max_steps, 'step')}{named}; {saves}",
    }
    return [f"{name:<7} {text}" for name, text in lines.items()]


def _evaluations(config: TrainConfig, trainer: Algorithm) -> str:
    """Return when the held-out questions are scored, and on how many."""
    every, size = config.evaluation_schedule(len(trainer.held_out))
    scored = f"every {plural(every, 'step')}" if every else "before and after"
    if every and size and size < len(trainer.held_out):
        scored += f" on the first {size}, before and after on all"
    if every and config.evaluation.every is None:
        scored += ", by default, as it adds at most 10 % to the completions (evaluation.every=0: never)"
    right = f"right: {trainer.criterion}, " if trainer.criterion else ""
    return f"{right}scored {scored}: {getattr(trainer.held_out, 'described', len(trainer.held_out))}"
