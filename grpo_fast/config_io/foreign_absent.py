"""Foreign keys without a place here: one reason for each, and the values that ask for what is so anyway."""

from __future__ import annotations

from grpo_fast.config_io.foreign_rules import Absent

_BATCH = (
    "sequences are packed by tokens: set micro_batch_tokens, and prompts_per_step = per-device batch x "
    "gradient accumulation x processes / num_generations"
)
_ONE_PROCESS = "one process drives the model; there is nothing to set for data parallelism"
_HUB = "nothing is uploaded; `grpo-fast export` writes a folder that can be"
_LOADER = "prompts are tokenised once, before training, and drawn in a seeded shuffle"
_EVALUATION = "held-out questions are generated and scored like a step's; see the keys of `evaluation`"
_BEST = "checkpoints are kept by age: checkpoint.keep"
_COMPILE = "the model runs as loaded; the head has its own kernels"
_PACKING = "sequences are always packed flat, without padding"
_REFERENCE = "the reference stays the model that training started from"
_ENGINE = "the rollout engine sets itself up; see the keys of `rollout`"
_TEXT = "models here read and write text"


def _absent(reason: str, **harmless: object) -> dict[str, Absent]:
    """One reason for several keys, each with the value, or tuple of values, that does no harm."""
    return {
        key: Absent(reason, value if isinstance(value, tuple) else (value,))
        for key, value in harmless.items()
    }


ABSENT: dict[str, Absent] = {
    **_absent(
        _BATCH,
        per_device_train_batch_size=(),
        gradient_accumulation_steps=(),
        micro_batch_size=(),
        batch_size=(),
        generation_batch_size=None,
        steps_per_generation=None,
        auto_find_batch_size=False,
    ),
    **_absent(
        "a run is counted in steps: set max_steps (epochs x questions / prompts_per_step)",
        num_train_epochs=(),
        num_epochs=(),
    ),
    **_absent(
        _ONE_PROCESS,
        accelerator_config=None,
        average_tokens_across_devices=(True, False),
        context_parallel_size=(None, 1),
        ddp_backend=None,
        ddp_broadcast_buffers=None,
        ddp_bucket_cap_mb=None,
        ddp_find_unused_parameters=None,
        ddp_static_graph=None,
        ddp_timeout=(None, 1800),
        deepspeed=None,
        ds3_gather_for_generation=(True, False),
        fsdp=(None, "", []),
        fsdp_config=None,
        fsdp_version=None,
        local_rank=(None, -1, 0),
        log_level_replica=(None, "warning"),
        log_on_each_node=(True, False),
        parallelism_config=None,
        save_on_each_node=False,
        tensor_parallel_size=(None, 1),
    ),
    **_absent(
        _HUB,
        hub_always_push=False,
        hub_model_id=None,
        hub_private_repo=None,
        hub_revision=None,
        hub_strategy=(None, "every_save"),
        hub_token=None,
        log_completions_hub_repo=None,
        push_to_hub=False,
        trackio_bucket_id=None,
        trackio_space_id=None,
        trackio_static_space_id=None,
    ),
    **_absent(
        _LOADER,
        dataloader_drop_last=(True, False),
        dataloader_in_order=True,
        dataloader_multiprocessing_context=None,
        dataloader_num_workers=(None, 0),
        dataloader_persistent_workers=False,
        dataloader_pin_memory=(True, False),
        dataloader_prefetch_factor=None,
        dataset_num_proc=None,
        dataset_prepared_path=None,
        dataset_processes=None,
        group_by_length=False,
        length_column_name=(None, "length"),
        remove_unused_columns=(None, False),
        shuffle_dataset=(None, True),
        skip_prepare_dataset=(True, False),
        train_sampling_strategy=(None, "random"),
    ),
    **_absent(
        _EVALUATION,
        batch_eval_metrics=False,
        dataset_test_split=None,
        eval_accumulation_steps=None,
        eval_delay=(None, 0),
        eval_do_concat_batches=True,
        eval_on_start=(True, False),
        eval_use_gather_object=False,
        include_for_metrics=(None, []),
        per_device_eval_batch_size=None,
        eval_batch_size=None,
        prediction_loss_only=False,
    ),
    **_absent(
        "evaluation.every counts steps, 0 for before and after only",
        eval_strategy=(None, "no", "steps", False),
        evals_per_epoch=None,
    ),
    **_absent(
        "checkpoint.every counts steps, 0 for the end only",
        save_strategy=(None, "no", "steps", False),
        saves_per_epoch=None,
    ),
    **_absent(
        "logging.every counts steps", logging_strategy=(None, "steps"), logging_first_step=(True, False)
    ),
    **_absent(
        _BEST,
        early_stopping_patience=None,
        greater_is_better=None,
        load_best_model_at_end=False,
        metric_for_best_model=None,
    ),
    **_absent(
        "a checkpoint always holds all that resuming needs, and `grpo-fast train --resume` takes it up",
        enable_jit_checkpoint=False,
        ignore_data_skip=False,
        restore_callback_states_from_checkpoint=False,
        resume_from_checkpoint=(None, False),
        save_only_model=False,
    ),
    **_absent(
        _COMPILE,
        torch_compile=False,
        torch_compile_backend=None,
        torch_compile_mode=None,
        torch_empty_cache_steps=None,
    ),
    **_absent("computation is in model.dtype", bf16_full_eval=False, fp16_full_eval=False, tf32=None),
    **_absent(
        "weights are trained at model.dtype; nothing is quantised", load_in_4bit=False, load_in_8bit=False
    ),
    **_absent("recomputation is on or off: model.gradient_checkpointing", gradient_checkpointing_kwargs=None),
    **_absent("liger-kernel's layers are on or off: model.liger_kernels", liger_kernel_config=None),
    **_absent("the optimiser is AdamW on all trained weights", optim_args=None, optim_target_modules=None),
    **_absent(
        "a policy is trained by its rewards alone",
        label_names=None,
        label_smoothing_factor=(None, 0),
        neftune_noise_alpha=None,
        train_on_inputs=False,
    ),
    **_absent("the trainer's forward never keeps a cache", use_cache=(True, False)),
    **_absent(
        "a figure that is not finite is shown, and never replaced", logging_nan_inf_filter=(True, False)
    ),
    **_absent("tokens are always counted", include_num_input_tokens_seen=(None, "no", False, True)),
    **_absent("use `grpo-fast train --plain` for plain lines", disable_tqdm=(None, False)),
    **_absent("`grpo-fast --debug` shows tracebacks", log_level=(None, "passive"), debug=(None, "", False)),
    **_absent("memory is a metric of every step", skip_memory_metrics=(True, False)),
    **_absent("a run is named by its output_dir", run_name=None, wandb_name=None, wandb_run_id=None),
    **_absent(
        "log in with the tracker's own variables", wandb_entity=None, wandb_log_model=None, wandb_watch=None
    ),
    **_absent(
        "the command says what is done", do_train=(True, False), do_eval=(True, False), do_predict=False
    ),
    **_absent("a CPU run is bit-identical from its seed; a GPU run is not", full_determinism=False),
    **_absent("the router's auxiliary loss is not added", router_aux_loss_coef=(None, 0)),
    **_absent("the policy runs without dropout, model.lora.dropout apart", disable_dropout=(True, False)),
    **_absent("logits are accumulated in fp32 whatever the head's dtype", cast_lm_head_to_fp32=False),
    **_absent(
        _PACKING,
        eval_sample_packing=(None, True, False),
        pad_to_multiple_of=(None, "auto"),
        pad_to_sequence_len=(None, True, False),
        padding_free=(None, True, False),
        sample_packing=(None, True, False),
    ),
    **_absent(
        "set dataset.max_prompt_length and rollout.max_completion_length", sequence_len=(), max_length=()
    ),
    **_absent("model.chat_template is a Jinja file, for a tokenizer without one", chat_template=None),
    **_absent("the model's chat template is called without options", chat_template_kwargs=None),
    **_absent("it would draw from another distribution than the policy's", repetition_penalty=(None, 1)),
    **_absent(
        _ENGINE,
        cache_implementation=None,
        transformers_continuous_batching_config=None,
        use_transformers_continuous_batching=(None, False),
        use_transformers_paged=(None, False),
        vllm_enable_sleep_mode=(None, True, False),
        vllm_group_port=(),
        vllm_mode=(None, "colocate"),
        vllm_model_impl=(None, "vllm"),
        vllm_server_base_url=None,
        vllm_server_host=(),
        vllm_server_port=(),
        vllm_server_timeout=(),
        vllm_structured_outputs_regex=None,
    ),
    **_absent("answers are single turns, without tools", max_tool_calling_iterations=None),
    **_absent(_REFERENCE, ref_model_mixup_alpha=(), ref_model_sync_steps=(), sync_ref_model=False),
    **_absent(
        "sampled completions are saved every logging.samples_every steps",
        log_completions=(True, False),
        log_unique_prompts=False,
    ),
    **_absent(_TEXT, log_multimodal=(True, False)),
    **_absent(
        "the preference loss has no such term; see preference.loss",
        activation_offloading=False,
        discopop_tau=(),
        f_alpha_divergence_coef=(),
        f_divergence_type=(None, "reverse_kl"),
        ld_alpha=None,
        use_weighting=False,
    ),
    **_absent("set preference.loss", label_smoothing=(None, 0), loss_weights=None),
    **_absent(
        "reference log-probabilities are computed once and kept",
        precompute_ref_batch_size=None,
        precompute_ref_log_probs=(True, False),
    ),
    **_absent(
        "too long prompts are dataset.overlong_prompts; nothing is padded", pad_token=None, truncation_mode=()
    ),
}
