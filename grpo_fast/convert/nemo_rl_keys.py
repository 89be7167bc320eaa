"""NeMo-RL's keys: those that only change their name, and why whole parts have no place here."""

from __future__ import annotations

MOVED: dict[str, str] = {
    "checkpointing.checkpoint_dir": "output_dir",
    "checkpointing.keep_top_k": "checkpoint.keep",
    "checkpointing.save_period": "checkpoint.every",
    "data.dataset_name": "dataset.source",
    "data.input_key": "dataset.prompt_column",
    "data.max_input_seq_length": "dataset.max_prompt_length",
    "data.train.data_path": "dataset.source",
    "data.train.dataset_name": "dataset.source",
    "data.train.input_key": "dataset.prompt_column",
    "data.train.split": "dataset.split",
    "data.train.subset": "dataset.name",
    "data.train_data_path": "dataset.source",
    "data.train_split": "dataset.split",
    "data.val_data_path": "evaluation.dataset.source",
    "data.val_split": "evaluation.dataset.split",
    "data.validation.data_path": "evaluation.dataset.source",
    "data.validation.dataset_name": "evaluation.dataset.source",
    "data.validation.input_key": "evaluation.dataset.prompt_column",
    "data.validation.split": "evaluation.dataset.split",
    "dpo.max_num_steps": "max_steps",
    "dpo.reference_policy_kl_penalty": "preference.loss.beta",
    "dpo.seed": "seed",
    "dpo.val_period": "evaluation.every",
    "grpo.dynamic_sampling_max_gen_batches": "advantage.max_draws",
    "grpo.max_val_samples": "evaluation.size",
    "grpo.num_generations_per_prompt": "rollout.num_generations",
    "grpo.num_prompts_per_step": "prompts_per_step",
    "grpo.overlong_filtering": "advantage.mask_truncated",
    "grpo.seed": "seed",
    "grpo.use_dynamic_sampling": "advantage.dynamic_sampling",
    "grpo.val_num_generations_per_prompt": "evaluation.num_samples",
    "grpo.val_period": "evaluation.every",
    "logger.tensorboard_enabled": "logging.tensorboard",
    "logger.wandb.project": "logging.project",
    "logger.wandb_enabled": "logging.wandb",
    "loss_fn.ratio_clip_c": "loss.delta",
    "loss_fn.ratio_clip_max": "loss.epsilon_high",
    "loss_fn.ratio_clip_min": "loss.epsilon_low",
    "loss_fn.reference_policy_kl_penalty": "loss.beta",
    "loss_fn.reference_policy_kl_type": "loss.kl_estimator",
    "loss_fn.use_kl_in_reward": "loss.kl_in_reward",
    "policy.dtensor_cfg.activation_checkpointing": "model.gradient_checkpointing",
    "policy.generation.max_new_tokens": "rollout.max_completion_length",
    "policy.generation.temperature": "rollout.temperature",
    "policy.generation.top_p": "rollout.top_p",
    "policy.generation.val_temperature": "evaluation.temperature",
    "policy.max_grad_norm": "optimizer.max_grad_norm",
    "policy.model_name": "model.path",
    "policy.optimizer.kwargs.betas": "optimizer.betas",
    "policy.optimizer.kwargs.eps": "optimizer.eps",
    "policy.optimizer.kwargs.lr": "optimizer.learning_rate",
    "policy.optimizer.kwargs.weight_decay": "optimizer.weight_decay",
    "policy.precision": "model.dtype",
}

_ENGINE = "the rollout engine sets itself up; see the keys of `rollout`"
_LENGTH = "set dataset.max_prompt_length and rollout.max_completion_length"
_PACKED = "sequences are packed by tokens: micro_batch_tokens"

# By prefix, the longest that fits.
REASONS: dict[str, str] = {
    "checkpointing": "a checkpoint holds all that resuming needs, and the newest are kept: checkpoint.keep",
    "cluster": "one process drives the model; it is started where it runs",
    "data": "rows become prompts by dataset.prompt_column, prompt_template and system_prompt",
    "data.shuffle": "prompts are drawn in a seeded shuffle",
    "data_plane": "rollout and training are one process",
    "dpo": "held-out pairs are scored like a step's, and steps are counted, not epochs",
    "dpo.preference_loss_weight": "a sum of losses has preference.loss.loss_weights",
    "env": "answers are scored by functions: set `rewards`",
    "env.math.num_workers": "rewards run in threads, each with a time limit: rewards.timeout",
    "grpo.advantage_clip": "advantages are not clipped",
    "grpo.async_grpo": "generation and training take turns; completions are always the current policy's",
    "grpo.batch_multiplier": "dynamic sampling draws whole batches: advantage.max_draws",
    "grpo.adv_estimator.minus_baseline": "belongs to another estimator of advantages",
    "grpo.invalid_tool_call_advantage": "answers are single turns, without tools",
    "grpo.malformed_thinking_advantage": "score it by a reward, such as tag_format",
    "grpo.max_num_epochs": "a run is counted in steps: set max_steps",
    "grpo.max_rollout_turns": "answers are single turns",
    "grpo.reward_scaling": "scale a reward by its weight, or inside the function",
    "grpo.reward_shaping": "add the reward soft_overlong",
    "grpo.seq_logprob_error_threshold": "see loss.sampler_correction",
    "grpo.stop_at_validation": "a run ends at max_steps, or by a signal, which saves it",
    "grpo.val": "held-out questions are scored before and after, and every evaluation.every steps",
    "logger": "metrics are always JSONL; see the keys of `logging`",
    "loss_fn.kl_": "the KL terms are not clamped",
    "on_policy_distillation": "there is no teacher",
    "policy.draft": "there is no speculative decoding",
    "policy.dtensor_cfg": "one process drives the model; there is nothing to shard",
    "policy.dtensor_cfg.lora_cfg": "LoRA runs through peft; see the keys of `model.lora`",
    "policy.dynamic_batching": _PACKED,
    "policy.generation": _ENGINE,
    "policy.generation.val_top": "held-out answers are drawn like the rollout's but for the temperature",
    "policy.generation_batch_size": "completions in flight are limited by tokens: rollout.max_batch_tokens",
    "policy.hf_config_overrides": "the model's own configuration holds",
    "policy.logprob": "log-probabilities never need whole logits; there is nothing to chunk",
    "policy.make_sequence_length_divisible_by": "nothing is padded",
    "policy.max_total_sequence_length": _LENGTH,
    "policy.megatron_cfg": "models run through transformers; there is no Megatron",
    "policy.offload_optimizer_for_logprob": "the optimizer stays where the model is",
    "policy.optimizer": "the optimiser is torch's AdamW on all trained weights",
    "policy.sequence_packing": "sequences are always packed",
    "policy.tokenizer": "the tokenizer is the model's own; see model.chat_template",
    "policy.train_micro_batch_size": _PACKED,
    "reward_penalties": "score it by a reward",
}


def reason_for(key: str) -> str | None:
    """Why a key has no place here, by the longest prefix; none where nothing is known of it."""
    fitting = [prefix for prefix in REASONS if key == prefix or _under(key, prefix)]
    return REASONS[max(fitting, key=len)] if fitting else None


def _under(key: str, prefix: str) -> bool:
    # A prefix ends at a dot, or inside a name where it stands for several: `grpo.val` is `grpo.val_period`.
    return key.startswith(prefix) and (prefix.count(".") > 0 or key[len(prefix)] == ".")
