"""The lines at a run's start: what is trained, on what and where."""

from __future__ import annotations

import torch

from grpo_fast.config.methods import describe_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import plural
from grpo_fast.config.stages import resolve_stages
from grpo_fast.loop.algorithm import Algorithm


def opening_lines(config: TrainConfig, trainer: Algorithm) -> list[str]:
    """Return a few lines that begin with a name: model, data, the algorithm's own, method and run."""
    policy, world, dataset = trainer.policy, trainer.world, trainer.prompts.dataset
    total = sum(p.numel() for p in policy.model.parameters())
    trained = sum(p.numel() for p in policy.trainable().values())
    cuda = policy.device.type == "cuda"
    threads = plural(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name(policy.device) if cuda else f"CPU, {threads}"
    if world.size > 1:
        where = f"{world.size} ranks ({config.distributed.mode}), each on {where}"
    dtype = str(policy.base_model.dtype).removeprefix("torch.")
    data = getattr(dataset, "described", plural(len(dataset), "prompt"))
    if held_out := trainer.held_out:
        every, size = config.evaluation_schedule(len(held_out))
        scored = f"every {plural(every, 'step') if every > 1 else 'step'}" if every else "before and after"
        if every and size and size < len(held_out):
            scored += f" on the first {size}, before and after on all"
        if every and config.evaluation.every is None:
            scored += ", by default, as it adds at most 10 % to the completions (evaluation.every=0: never)"
        right = f"right: {trainer.criterion}, " if trainer.criterion else ""
        data += f"; held out, {right}scored {scored}: {getattr(held_out, 'described', len(held_out))}"
    stages = resolve_stages(config)
    methods = dict.fromkeys(text for stage in stages if (text := describe_method(stage.config)))
    every = config.checkpoint.every
    saves = f"a checkpoint every {every} steps and at the end" if every else "one checkpoint, at the end"
    saves = "a checkpoint every step" if every == 1 else saves
    named = ", ".join(stage.name for stage in stages if stage.name)
    named = f" in the stages {named}" if named else ""
    lines = {
        "model": f"{config.model.path}: {total:,} parameters, {trained:,} trained; {dtype} on {where}",
        "data": data,
        **trainer.described(),
        **({"method": "; ".join(methods)} if methods else {}),
        "run": f"{config.output_dir}: {plural(config.max_steps, 'step')}{named}; {saves}",
    }
    return [f"{name:<7} {text}" for name, text in lines.items()]
