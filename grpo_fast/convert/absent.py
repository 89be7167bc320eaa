"""TRL's and Axolotl's keys without a place here: one reason for each, and the values that do no harm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Absent:
    """A foreign key without a place here, and what to do instead."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that ask for what is so anyway


_REASONS = {
    "sequences are packed by tokens: set micro_batch_tokens, and prompts_per_step = per-device batch x "
    "gradient accumulation x processes / num_generations": (
        "per_device_train_batch_size gradient_accumulation_steps micro_batch_size batch_size "
        "generation_batch_size steps_per_generation auto_find_batch_size"
    ),
    "a run is counted in steps: set max_steps (epochs x questions / prompts_per_step)": (
        "num_train_epochs num_epochs"
    ),
    "one process drives the model; there is nothing to set for data parallelism": (
        "accelerator_config average_tokens_across_devices context_parallel_size ddp_backend "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph ddp_timeout "
        "deepspeed ds3_gather_for_generation fsdp fsdp_config fsdp_version local_rank log_level_replica "
        "log_on_each_node parallelism_config save_on_each_node tensor_parallel_size"
    ),
    "nothing is uploaded; `grpo-fast export` writes a folder that can be": (
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token "
        "log_completions_hub_repo push_to_hub trackio_bucket_id trackio_space_id trackio_static_space_id"
    ),
    "prompts are tokenised once, before training, and drawn in a seeded shuffle": (
        "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc "
        "dataset_prepared_path dataset_processes group_by_length length_column_name remove_unused_columns "
        "shuffle_dataset skip_prepare_dataset train_sampling_strategy"
    ),
    "held-out questions are generated and scored like a step's; see the keys of `evaluation`": (
        "batch_eval_metrics dataset_test_split eval_accumulation_steps eval_delay eval_do_concat_batches "
        "eval_on_start eval_use_gather_object include_for_metrics per_device_eval_batch_size "
        "eval_batch_size prediction_loss_only"
    ),
    "evaluation.every counts steps, 0 for before and after only": "eval_strategy evals_per_epoch",
    "checkpoint.every counts steps, 0 for the end only": "save_strategy saves_per_epoch",
    "logging.every counts steps": "logging_strategy logging_first_step",
    "checkpoints are kept by age: checkpoint.keep": (
        "early_stopping_patience greater_is_better load_best_model_at_end metric_for_best_model"
    ),
    "a checkpoint always holds all that resuming needs, and `grpo-fast train --resume` takes it up": (
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint "
        "resume_from_checkpoint save_only_model"
    ),
    "the model runs as loaded; the head has its own kernels": (
        "torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps"
    ),
    "computation is in model.dtype": "bf16_full_eval fp16_full_eval tf32",
    "weights are trained at model.dtype; nothing is quantised": "load_in_4bit load_in_8bit",
    "recomputation is on or off: model.gradient_checkpointing": "gradient_checkpointing_kwargs",
    "liger-kernel's layers are on or off: model.liger_kernels": "liger_kernel_config",
    "the optimiser is AdamW on all trained weights": "optim_args optim_target_modules",
    "a policy is trained by its rewards alone": (
        "label_names label_smoothing_factor neftune_noise_alpha train_on_inputs"
    ),
    "the trainer's forward never keeps a cache": "use_cache",
    "a figure that is not finite is shown, and never replaced": "logging_nan_inf_filter",
    "tokens are always counted": "include_num_input_tokens_seen",
    "use `grpo-fast train --plain` for plain lines": "disable_tqdm",
    "`grpo-fast --debug` shows tracebacks": "log_level debug",
    "memory is a metric of every step": "skip_memory_metrics",
    "a run is named by its output_dir": "run_name wandb_name wandb_run_id",
    "log in with the tracker's own variables": "wandb_entity wandb_log_model wandb_watch",
    "the command says what is done": "do_train do_eval do_predict",
    "a CPU run is bit-identical from its seed; a GPU run is not": "full_determinism",
    "the router's auxiliary loss is not added": "router_aux_loss_coef",
    "the policy runs without dropout, model.lora.dropout apart": "disable_dropout",
    "logits are accumulated in fp32 whatever the head's dtype": "cast_lm_head_to_fp32",
    "sequences are always packed flat, without padding": (
        "eval_sample_packing pad_to_multiple_of pad_to_sequence_len padding_free sample_packing"
    ),
    "set dataset.max_prompt_length and rollout.max_completion_length": "sequence_len max_length",
    "model.chat_template is a Jinja file, for a tokenizer without one": "chat_template",
    "the model's chat template is called without options": "chat_template_kwargs",
    "it would draw from another distribution than the policy's": "repetition_penalty",
    "the rollout engine sets itself up; see the keys of `rollout`": (
        "cache_implementation transformers_continuous_batching_config use_transformers_continuous_batching "
        "use_transformers_paged vllm_enable_sleep_mode vllm_group_port vllm_mode vllm_model_impl "
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
        "vllm_structured_outputs_regex"
    ),
    "answers are single turns, without tools": "max_tool_calling_iterations",
    "the reference stays the model that training started from": (
        "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model"
    ),
    "sampled completions are saved every logging.samples_every steps": "log_completions log_unique_prompts",
    "models here read and write text": "log_multimodal",
    "the preference loss has no such term; see preference.loss": (
        "activation_offloading discopop_tau f_alpha_divergence_coef f_divergence_type ld_alpha use_weighting"
    ),
    "set preference.loss": "label_smoothing loss_weights",
    "reference log-probabilities are computed once and kept": (
        "precompute_ref_batch_size precompute_ref_log_probs"
    ),
    "too long prompts are dataset.overlong_prompts; nothing is padded": "pad_token truncation_mode",
}

# What does no harm: asking for nothing, either value of a switch that changes no result, and these.
_NOTHING: tuple[Any, ...] = (None, False, "", [])
_SWITCHES = (
    "average_tokens_across_devices ds3_gather_for_generation log_on_each_node dataloader_drop_last "
    "dataloader_pin_memory skip_prepare_dataset eval_on_start logging_first_step use_cache "
    "logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics do_train do_eval "
    "disable_dropout eval_sample_packing pad_to_sequence_len padding_free sample_packing "
    "vllm_enable_sleep_mode log_completions log_multimodal precompute_ref_log_probs"
)
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES.split(), (*_NOTHING, True, "no")),
    **dict.fromkeys(("context_parallel_size", "tensor_parallel_size", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("dataloader_num_workers", "eval_delay", "label_smoothing_factor"), (None, 0)),
    **dict.fromkeys(("router_aux_loss_coef", "label_smoothing"), (None, 0)),
    **dict.fromkeys(("eval_strategy", "save_strategy"), (*_NOTHING, "no", "steps")),
    "logging_strategy": (None, "steps"),
    "dataloader_in_order": (True,),
    "eval_do_concat_batches": (True,),
    "shuffle_dataset": (None, True),
    "ddp_timeout": (None, 1800),
    "local_rank": (None, -1, 0),
    "log_level_replica": (None, "warning"),
    "hub_strategy": (None, "every_save"),
    "length_column_name": (None, "length"),
    "train_sampling_strategy": (None, "random"),
    "log_level": (None, "passive"),
    "pad_to_multiple_of": (None, "auto"),
    "vllm_mode": (None, "colocate"),
    "vllm_model_impl": (None, "vllm"),
    "f_divergence_type": (None, "reverse_kl"),
}

ABSENT = {
    name: Absent(reason, _HARMLESS.get(name, _NOTHING))
    for reason, names in _REASONS.items()
    for name in names.split()
}
