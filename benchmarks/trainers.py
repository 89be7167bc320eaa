"""Train a configuration with our trainer, or with TRL's GRPOTrainer and the same settings.

Our loader gives TRL the model in float32; `model.dtype: bfloat16` becomes TRL's autocast. With vLLM TRL loads
the model. Our rewards score TRL's completions, and our engine answers both trainers' held-out questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.load import load_config
from grpo_fast.config.schema import TrainConfig

from .measure import Stopwatch
from .updates import trl_trainer

UPDATE = "update"
_TRL_PHASES = {
    "_generate_single_turn": "generate",
    "_calculate_rewards": "reward",
    "_generate_and_score_completions": "log-probabilities and padding",
    "training_step": UPDATE,
}


def train_ours(recipe: str, overrides: Sequence[str], *_: Any) -> dict[str, Any]:
    """Train without evaluations and checkpoints; return steps and lengths as `train_with_trl` does."""
    from grpo_fast.plan import resolve_auto
    from grpo_fast.run import build_trainer

    config = resolve_auto(load_config(recipe, overrides))
    steps, lengths, trainer = [], [], build_trainer(config)
    with trainer.engine:
        for _ in range(config.max_steps):
            result = trainer.train_step()
            times = {name: of for name, of in result.timings.items() if "time/" in name}
            phases = {name.removeprefix("time/"): of for name, of in times.items()}
            steps.append((phases.pop("step"), phases))
            lengths.append(result.metrics["completion/length_mean"])
    return {"steps": steps, "lengths": lengths}


def train_with_trl(
    recipe: str, overrides: Sequence[str], rows: int, our_head: bool = False
) -> dict[str, Any]:
    """Train with TRL in this process, with micro-batches of so many rows.

    Returns:
        `steps`, seconds and phases of each; `lengths`, mean tokens of a completion in each; `scores`,
        evaluations with the seconds of training before them; and `peak_bytes` of the process.

    Raises:
        ValueError: a setting of the recipe has no equivalent in TRL's trainer.
    """
    from transformers import TrainerCallback

    from grpo_fast.integrations.trl import patched
    from grpo_fast.plan import resolve_auto
    from grpo_fast.policy import load_policy
    from grpo_fast.policy.host_memory import bytes_in_use
    from grpo_fast.policy.load import resolve_device
    from grpo_fast.rewards import load_rewards
    from grpo_fast.rollout.types import Completion
    from grpo_fast.run.loader import Loader, use_threads

    device = resolve_device(load_config(recipe, overrides).model.device)
    config = resolve_auto(load_config(recipe, last_of([*overrides, f"model.device={device.type}"])))
    _require_translatable(config)
    use_threads(config)
    torch.manual_seed(config.seed)
    loader, rewards = Loader(config), load_rewards(config.rewards)
    _, prompts = loader.training(config)
    policy, model, tokenizer = None, Path(config.model.path), loader.tokenizer
    if not _uses_vllm(config):
        policy = load_policy(config.model.model_copy(update={"dtype": "float32"}))
        model, tokenizer = policy.model, policy.tokenizer
    watch, update, steps, scores = Stopwatch(device), ExitStack(), [], []

    def reward(completions: Sequence[str], completion_ids: Any, place: Any, **_: Any) -> list[float]:
        answers = zip(completion_ids, completions, strict=True)
        groups = [[Completion(tuple(ids), None, text, truncated=False)] for ids, text in answers]
        return rewards.score_completions([prompts[i] for i in place], groups).total.tolist()

    def evaluate(size: int | None = None) -> None:
        if loader.held_out is not None:
            found = _evaluation(config, policy, rewards, loader.held_out[:size])
            scores.append(found | {"step": len(steps), "seconds": sum(seconds for seconds, _ in steps)})

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.start()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            update.enter_context(watch.phase(UPDATE))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            update.close()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(watch.stop())
            last, every = len(steps) == config.max_steps, config.evaluation.every
            if last or (every and len(steps) % every == 0):
                evaluate(None if last else config.evaluation.size)

    texts = [tokenizer.decode(prompt.token_ids) for prompt in prompts]
    for text, prompt in zip(texts, prompts, strict=True):
        if tuple(tokenizer(text).input_ids) != tuple(prompt.token_ids):
            raise ValueError(f"TRL would read other tokens than we do: {text!r}")
    given = {"columns": {"place": [*range(len(prompts))]}, "reward": reward, **_options(config, rows)}
    trainer = trl_trainer(model, tokenizer, prompts=texts, **given)
    trainer.add_callback(Clock())
    for name, phase in _TRL_PHASES.items():
        setattr(trainer, name, watch.phase(phase)(getattr(trainer, name)))
    evaluate()
    with patched() if our_head else nullcontext():
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": steps, "lengths": lengths, "scores": scores, "peak_bytes": bytes_in_use(watch.device)}


def last_of(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the last of each key only."""
    return [*{text.partition("=")[0]: text for text in overrides}.values()]


def _evaluation(config: TrainConfig, policy: Any, rewards: Any, questions: Any) -> dict[str, Any]:
    """Score the held-out questions as `grpo-fast eval` does."""
    from grpo_fast.cli.questions import evaluation_sampling
    from grpo_fast.distributed.world import SINGLE_PROCESS
    from grpo_fast.loop.evaluate import evaluate
    from grpo_fast.rollout.transformers import TransformersEngine

    engine = TransformersEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_token_ids)
    sampling = evaluation_sampling(config, config.evaluation.num_samples)
    found = evaluate(engine, questions, rewards, config.evaluation, sampling, world=SINGLE_PROCESS)
    return {"score": found.score, "interval": found.interval, "n": found.n}


def _options(config: TrainConfig, rows: int) -> dict[str, Any]:
    """Return GRPOConfig's arguments."""
    loss, optimizer, rollout, vllm = config.loss, config.optimizer, config.rollout, _uses_vllm(config)
    batch = config.prompts_per_step * rollout.num_generations
    if batch % rows:
        raise ValueError(f"--sizes rows={rows} must divide the {batch} completions of a step")
    return _given(config, "max_steps", "seed", "num_iterations") | {
        **_given(rollout, "num_generations", "temperature", "top_p", "top_k", "max_completion_length"),
        **_given(loss, "beta", "loss_type", "entropy_coef", "epsilon_high", epsilon="epsilon_low"),
        **_given(loss, vllm_importance_sampling_mode="sampler_correction"),
        **_given(optimizer, "learning_rate", "weight_decay", "warmup_steps", adam_epsilon="eps"),
        **_given(config.advantage, "scale_rewards", mask_truncated_completions="mask_truncated"),
        **{"min_p": rollout.min_p or None, "lr_scheduler_type": optimizer.schedule},
        **{"per_device_train_batch_size": rows, "gradient_accumulation_steps": batch // rows},
        **{"adam_beta1": optimizer.betas[0], "adam_beta2": optimizer.betas[1]},
        **{"max_grad_norm": optimizer.max_grad_norm or 0.0, "bf16": config.model.dtype == "bfloat16"},
        **{"use_cpu": config.model.device == "cpu", "gradient_checkpointing": False},
        **{"use_vllm": vllm, "vllm_mode": "colocate"},
        "vllm_enable_sleep_mode": vllm and config.model.device != "cpu",
    }


def _given(section: Any, *names: str, **renamed: str) -> dict[str, Any]:
    """Return the keys of a section that are not None, some under TRL's names."""
    found = {of: getattr(section, name) for of, name in ({name: name for name in names} | renamed).items()}
    return {name: value for name, value in found.items() if value is not None}


def _uses_vllm(config: TrainConfig) -> bool:
    return config.rollout.engine == "vllm"


def _require_translatable(config: TrainConfig) -> None:
    """Raise ValueError for settings that `_options` does not translate."""
    rollout, advantage = config.rollout, config.advantage
    unknown = ("stop", "tools", "environment", "function")
    asked = {
        "algorithm": config.algorithm != "grpo",
        "model.lora": config.model.lora is not None,
        "evaluation.dataset": config.evaluation.dataset is not None and _uses_vllm(config),
        "minibatches": config.minibatches != 1,
        "stages": bool(config.stages),
        **{f"rollout.{name}": getattr(rollout, name) for name in unknown},
        "advantage": advantage.dynamic_sampling or advantage.soft_overlong or advantage.function,
        "loss.kl_in_reward": config.loss.kl_in_reward,
    }
    if names := [name for name, differs in asked.items() if differs]:
        raise ValueError(f"TRL's trainer is not given {', '.join(names)}; choose a recipe without")
