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
    cuda, threads = policy.device.type == "cuda", plural(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name(policy.device) if cuda else f"CPU, {threads}"
    if world.size > 1:
        where = f"{world.size} ranks ({config.distributed.mode}), each on {where}"
    dtype = str(policy.base_model.dtype).removeprefix("torch.")
    data = getattr(dataset, "described", plural(len(dataset), "prompt"))
    if trainer.held_out:
        data += f"; held out, {_evaluations(config, trainer)}"
    stages = resolve_stages(config)
    methods = dict.fromkeys(describe_method(stage.config) for stage in stages)
    names = ", ".join(stage.name for stage in stages if stage.name)
    named = f" in the stages {names}" if names else ""
    every = config.checkpoint.every
    saves = f"a checkpoint every {plural(every, 'step')} and" if every else "one checkpoint,"
    lines = {
        "model": f"{config.model.path}: {total:,} parameters, {trained:,} trained; {dtype} on {where}",
        "data": data,
        **trainer.described(),
        "method": "; ".join(filter(None, methods)),
        "run": f"{config.output_dir}: {plural(config.max_steps, 'step')}{named}; {saves} at the end",
    }
    return [f"{name:<7} {text}" for name, text in lines.items() if text]


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
