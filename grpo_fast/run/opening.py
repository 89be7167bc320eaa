"""What a run tells before its first step: what is trained, on what, where, and what the plan expects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from grpo_fast.config.methods import describe_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.stages import resolve_stages
from grpo_fast.data import PromptDataset
from grpo_fast.loop.algorithm import Algorithm
from grpo_fast.plan import DeviceBudget, device_budget, shape_of, step_total, with_values
from grpo_fast.record.summary import bytes_text


def opening_lines(config: TrainConfig, trainer: Algorithm) -> list[str]:
    """At most seven and one for each further stage, with a name in front; the plan's on a GPU only."""
    lines = {"model": _model(config, trainer), "data": _data(config, trainer)} | trainer.described()
    told = {describe_method(stage.config): stage.name for stage in reversed(resolve_stages(config))}
    methods = [f"{stage}: {text}" if stage else text for text, stage in reversed(told.items()) if text]
    lines |= {"method": "; ".join(methods)} if methods else {}
    lines["run"] = _run(config)
    if doubts := _doubts(config, trainer):
        lines["caution"] = "; ".join(doubts)
    if trainer.policy.device.type == "cuda" and trainer.engine is not None:
        lines["plan"] = expected(trainer, replace(device_budget(), ranks=trainer.world.size))
    return [f"{name:<7} {text}" for name, text in lines.items()]


def _model(config: TrainConfig, trainer: Algorithm) -> str:
    policy, lora = trainer.policy, config.model.lora
    parameters = sum(p.numel() for p in policy.model.parameters())
    trained = sum(p.numel() for p in policy.trainable().values())
    share = "all trained" if trained == parameters else f"{trained:,} trained"
    kind = "" if lora is None else f" (LoRA, r = {lora.r})"
    where = f"CPU, {(threads := torch.get_num_threads())} thread{'s' * (threads > 1)}"
    if policy.device.type == "cuda":
        where = torch.cuda.get_device_name(policy.device)
    world = trainer.world
    if world.size > 1:
        where = f"{world.size} ranks ({config.distributed.mode}), each on {where}"
    precision = str(policy.base_model.dtype).removeprefix("torch.")
    return f"{config.model.path}: {parameters:,} parameters, {share}{kind}; {precision} on {where}"


def _doubts(config: TrainConfig, trainer: Algorithm) -> list[str]:
    """What is allowed, and seldom meant."""
    lora, width = config.model.lora, trainer.policy.base_model.config.get_text_config().hidden_size
    doubts = []
    if trainer.policy.base_model.dtype == torch.float16:
        doubts.append("model.dtype = float16 loses small gradients, which bfloat16 keeps")
    if lora is not None and lora.r > width:
        doubts.append(f"model.lora.r = {lora.r} is more than the model's width, {width}: no adapter needs it")
    return doubts


def _data(config: TrainConfig, trainer: Algorithm) -> str:
    dataset, held_out, every = trainer.prompts.dataset, trainer.held_out, config.evaluation.every
    known = dataset.described if isinstance(dataset, PromptDataset) else f"{len(dataset):,} prompts"
    if not held_out:
        return known
    when = f"before, {_every(every)} and after" if every else "before and after"
    questions = held_out.described if isinstance(held_out, PromptDataset) else f"{len(held_out):,} questions"
    return f"{known}; held out, scored {when}: {questions}"


def _run(config: TrainConfig) -> str:
    stages, every = ", ".join(stage.name for stage in config.stages), config.checkpoint.every
    saves = f"a checkpoint {_every(every)} and at the end" if every else "one checkpoint, at the end"
    steps = f"{config.max_steps:,} step{'s' * (config.max_steps > 1)}"
    steps += f" in the stages {stages}" if stages else ""
    return f"{Path(config.output_dir)}: {steps}; {saves}"


def _every(steps: int) -> str:
    return f"every {steps} steps" if steps > 1 else "every step"


def expected(trainer: Algorithm, device: DeviceBudget) -> str:
    """Return the most bytes that the stage to come should take of the device."""
    config = trainer.config
    longest = max(len(prompt.token_ids) for prompt in trainer.prompts.dataset)
    known = with_values(config, {"dataset.max_prompt_length": longest})
    try:
        total = step_total(known, shape_of(config.model, device.kind), device)
    except (ValueError, RuntimeError) as error:
        return f"no estimate: {error}"
    update, rollout = (bytes_text(total[phase]) for phase in ("update", "rollout"))
    return f"{update} in the update and {rollout} in the rollout, of {bytes_text(device.total)}"
