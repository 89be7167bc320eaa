"""The one table of names that people know from TRL and Axolotl: each one's place here, or why it has none.

`load_config` reads it for keys at the top level of a YAML file and for overrides; `grpo-fast convert`
reads it for whole files.
"""

from __future__ import annotations

from grpo_fast.config_io import foreign_rules as rules
from grpo_fast.config_io.foreign_absent import ABSENT
from grpo_fast.config_io.foreign_rules import Moved, Rule, to

_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
_SCHEDULE = rules.choice(
    "optimizer.schedule", _SCHEDULES, "has no equivalent; optimizer.schedule is constant, linear or cosine"
)
_SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
_ADAMW = {"adamw_torch": ..., "adamw_torch_fused": ..., "adamw": ..., "adamw_hf": ..., None: ...}
# Terms that the loss has under the same name.
_LOSS_TERMS = (
    "delta",
    "importance_sampling_level",
    "use_bias_correction_kl",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_target",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)

MOVED: dict[str, Moved] = {
    "model_name_or_path": to("model.path"),
    "base_model": to("model.path"),
    "model_revision": to("model.revision"),
    "trust_remote_code": to("model.trust_remote_code"),
    "attn_implementation": to("model.attention"),
    "flash_attention": Moved(rules.flash, ("model.attention",)),
    "sdp_attention": Moved(rules.sdpa, ("model.attention",)),
    "model_init_kwargs": rules.options(rules.MODEL_OPTIONS),
    "dtype": Moved(rules.dtype, ("model.dtype",)),
    "torch_dtype": Moved(rules.dtype, ("model.dtype",)),
    "bf16": Moved(rules.precision, ("model.dtype",)),
    "fp16": Moved(rules.half, ("model.dtype",)),
    "use_cpu": Moved(rules.cpu, ("model.device",)),
    "gradient_checkpointing": to("model.gradient_checkpointing"),
    "use_liger_kernel": to("model.liger_kernels"),
    "use_peft": Moved(rules.adapter, ("model.lora",)),
    "adapter": Moved(rules.adapter, ("model.lora",)),
    "lora_r": rules.lora("r"),
    "lora_alpha": rules.lora("alpha"),
    "lora_dropout": rules.lora("dropout"),
    "lora_target_modules": rules.lora("target_modules"),
    "lora_target_linear": Moved(rules.all_linear, ("model.lora.target_modules",)),
    "dataset_name": to("dataset.source"),
    "dataset_config": to("dataset.name"),
    "dataset_train_split": to("dataset.split"),
    "max_prompt_length": to("dataset.max_prompt_length"),
    "system_prompt": to("dataset.system_prompt"),
    "data_seed": to("dataset.seed"),
    "reward_funcs": Moved(rules.reward_funcs, ("rewards",)),
    "reward_weights": Moved(rules.reward_weights, ("rewards",)),
    "num_generations": to("rollout.num_generations"),
    "max_completion_length": to("rollout.max_completion_length"),
    "temperature": to("rollout.temperature"),
    "top_p": to("rollout.top_p"),
    "top_k": Moved(rules.top_k, ("rollout.top_k",)),
    "min_p": to("rollout.min_p"),
    "stop": Moved(rules.stop, ("rollout.stop",)),
    "generation_kwargs": rules.options(rules.GENERATION_OPTIONS),
    "use_vllm": rules.choice(
        "rollout.engine", {True: "vllm", False: "transformers", None: ...}, "is not a boolean"
    ),
    "vllm_gpu_memory_utilization": to("rollout.vllm.gpu_memory_utilization"),
    "vllm_max_model_length": to("rollout.vllm.max_model_length"),
    "vllm_tensor_parallel_size": to("rollout.vllm.tensor_parallel_size"),
    "scale_rewards": rules.choice(
        "advantage.scale_rewards", _SCALES, "has no equivalent; it is group, batch or none"
    ),
    "multi_objective_aggregation": to("advantage.multi_objective_aggregation"),
    "mask_truncated_completions": to("advantage.mask_truncated"),
    "algorithm": to("algorithm"),
    "rl": rules.choice("algorithm", {"grpo": "grpo"}, "has no equivalent; the algorithm here is grpo"),
    "loss_type": to("loss.loss_type"),
    "beta": to("loss.beta"),
    "epsilon": to("loss.epsilon_low"),
    "epsilon_high": to("loss.epsilon_high"),
    **{name: to(f"loss.{name}") for name in _LOSS_TERMS},
    "vllm_importance_sampling_correction": Moved(rules.correction, ("loss.sampler_correction",)),
    "vllm_importance_sampling_mode": Moved(rules.correction_mode, ("loss.sampler_correction",)),
    "vllm_importance_sampling_clip_max": to("loss.sampler_clip_max"),
    "vllm_importance_sampling_clip_min": to("loss.sampler_clip_min"),
    "vllm_importance_sampling_cap": to("loss.sampler_clip_max"),
    "num_iterations": to("num_iterations"),
    "max_steps": Moved(rules.max_steps, ("max_steps",)),
    "seed": to("seed"),
    "output_dir": to("output_dir"),
    "learning_rate": to("optimizer.learning_rate"),
    "weight_decay": to("optimizer.weight_decay"),
    "max_grad_norm": Moved(rules.grad_norm, ("optimizer.max_grad_norm",)),
    "adam_beta1": Moved(rules.betas, ("optimizer.betas",)),
    "adam_beta2": Moved(rules.betas, ("optimizer.betas",)),
    "adam_epsilon": to("optimizer.eps"),
    "optim": rules.choice("optimizer", _ADAMW, "has no equivalent; the optimiser here is AdamW"),
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_kwargs": Moved(rules.schedule_options, ("optimizer.min_learning_rate_ratio",)),
    "cosine_min_lr_ratio": to("optimizer.min_learning_rate_ratio"),
    "warmup_steps": Moved(rules.warmup, ("optimizer.warmup_steps",)),
    "warmup_ratio": Moved(rules.warmup, ("optimizer.warmup_steps",)),
    "logging_steps": rules.steps("logging.every", "logging_strategy"),
    "num_completions_to_print": to("logging.samples"),
    "report_to": Moved(rules.report_to, tuple(f"logging.{name}" for name in rules.TRACKERS)),
    "project": to("logging.project"),
    "wandb_project": to("logging.project"),
    "save_steps": rules.steps("checkpoint.every", "save_strategy"),
    "save_total_limit": to("checkpoint.keep"),
    "eval_steps": rules.steps("evaluation.every", "eval_strategy"),
    "num_generations_eval": to("evaluation.num_samples"),
}

RULES: dict[str, Rule] = {**MOVED, **ABSENT}
