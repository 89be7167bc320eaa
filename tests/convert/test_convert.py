"""Foreign configurations: every key in the account, the right places, an outcome that loads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast.config_io import ConfigError, convert_file, load_config
from grpo_fast.convert import convert, recognise
from grpo_fast.convert.names import NAMES
from grpo_fast.convert.references import flatten, resolve

AXOLOTL = """
{base_model: Qwen/Qwen2.5-1.5B-Instruct, rl: grpo, chat_template: tokenizer_default, made_up_key: 3,
 adapter: lora, lora_r: 32, lora_alpha: 64, lora_target_linear: true, bf16: true, output_dir: ./grpo-output,
 micro_batch_size: 8, gradient_accumulation_steps: 4, max_steps: 200, learning_rate: 5.0e-6,
 optimizer: adamw_torch_fused, warmup_steps: 10, val_set_size: 0.0, sequence_len: 512,
 vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.85},
 trl: {use_vllm: true, vllm_server_host: 0.0.0.0, use_data_producer: true, num_generations: 8,
       max_completion_length: 512, temperature: 0.7, epsilon_high: 0.28,
       reward_funcs: [rewards.accuracy_reward, rewards.format_reward], reward_weights: [1.0, 0.5]},
 datasets: [{path: openai/gsm8k, name: main, split: train, type: rewards.prompt_transform}]}
"""
NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 500, normalize_rewards: true,
       use_leave_one_out_baseline: true, val_period: 10, overlong_filtering: true, seed: 42,
       async_grpo: {enabled: false}}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: 3.0,
          use_importance_sampling_correction: true, truncated_importance_sampling_type: tis,
          truncated_importance_sampling_ratio: 2.0, sequence_level_importance_ratios: false,
          token_level_loss: true}
checkpointing: {enabled: true, checkpoint_dir: results/grpo, keep_top_k: 3, save_period: 10}
policy:
  {model_name: Qwen/Qwen2.5-1.5B, tokenizer: {name: "${policy.model_name}"}, max_grad_norm: 1.0,
   train_global_batch_size: 256, train_micro_batch_size: 4, max_total_sequence_length: 512,
   precision: bfloat16,
   dtensor_cfg: {activation_checkpointing: true,
                 lora_cfg: {enabled: true, dim: 8, alpha: 32, match_all_linear: true, target_modules: []}},
   megatron_cfg: {enabled: false, optimizer: {lr: 5.0e-6}},
   sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, \
                                                        ${policy.train_micro_batch_size}}"},
   optimizer: {name: torch.optim.AdamW,
               kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8, foreach: false}},
   scheduler: [{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}},
               {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}, {milestones: [50]}],
   generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0,
                val_temperature: "${.temperature}", top_k: null, vllm_cfg: {gpu_memory_utilization: 0.6}}}
data: {max_input_seq_length: "${policy.max_total_sequence_length}",
       train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05},
       default: {prompt_file: examples/prompts/cot.txt}}
env: {math: {num_workers: 8, math_verify_impl: hf_math_verify}}
logger: {wandb_enabled: true, wandb: {project: grpo-dev}}
cluster: {gpus_per_node: 1}
made_up: {key: 3}
"""


def outcomes(document: dict[str, Any] | str) -> dict[str, str]:
    document = yaml.safe_load(document) if isinstance(document, str) else document
    return {row.key: row.outcome for row in convert(document).rows}


def places(document: dict[str, Any] | str) -> Mapping[str, Any]:
    return convert(yaml.safe_load(document) if isinstance(document, str) else document).places


def test_an_axolotl_run_finds_its_places():
    found = places(AXOLOTL)

    assert found["model.path"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert found["model.lora.r"] == 32
    assert found["model.lora.target_modules"] == "all-linear"
    assert found["dataset.source"] == "openai/gsm8k"
    assert found["rewards"] == [
        {"reward": "rewards:accuracy_reward", "weight": 1.0},
        {"reward": "rewards:format_reward", "weight": 0.5},
    ]
    assert found["prompts_per_step"] == 8 * 4 // 8
    assert found["loss.epsilon_high"] == 0.28
    assert found["optimizer.schedule"] == "cosine"  # Axolotl's own default
    assert found["optimizer.betas"] == [0.9, 0.999]


def test_every_axolotl_key_is_in_the_account():
    document = yaml.safe_load(AXOLOTL)
    rows = outcomes(document)

    wanted = {key for key in document if key not in ("trl", "vllm", "datasets")}
    wanted |= {f"trl.{key}" for key in document["trl"]} | {f"vllm.{key}" for key in document["vllm"]}
    wanted |= {f"datasets.0.{key}" for key in document["datasets"][0]}
    assert wanted <= set(rows)
    assert rows["made_up_key"] == rows["trl.use_data_producer"] == "not applicable"
    assert all(row.reason for row in convert(document).rows if row.outcome == "not applicable")


def test_axolotls_lora_settings_count_only_with_its_adapter():
    document = yaml.safe_load(AXOLOTL)
    del document["adapter"], document["lora_target_linear"]
    assert not any(place.startswith("model.lora") for place in places(document))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rl: gdpo", {"advantage.multi_objective_aggregation": "normalize_then_sum"}),
        ("test_datasets: [{path: t, split: test}]", {"evaluation.dataset.split": "test"}),
        ("datasets: [{path: a}, {path: b}]", {"dataset.source": "a"}),
        ("trl: {top_k: -1, max_grad_norm: 0}", {"rollout.top_k": 0, "optimizer.max_grad_norm": None}),
    ],
)
def test_axolotls_own_terms_find_their_places(text, expected):
    found = places(f"base_model: m\n{text}")
    assert {place: found.get(place, ...) for place in expected} == expected


def test_a_nemo_rl_run_finds_its_places():
    found = places(NEMO)

    for section, expected in {
        "rollout": {"num_generations": 16, "max_completion_length": 512, "engine": "vllm"},
        "advantage": {"baseline": "leave_one_out", "mask_truncated": True, "scale_rewards": "group"},
        "loss": {"loss_type": "dapo", "beta": 0.01, "epsilon_high": 0.28, "delta": 3.0}
        | {"sampler_correction": "token_truncate", "sampler_clip_max": 2.0},
        "model": {"gradient_checkpointing": True, "lora.r": 8, "lora.target_modules": "all-linear"},
        "optimizer": {"warmup_steps": 50, "schedule": "constant", "learning_rate": 5e-6},
    }.items():
        assert {key: found.get(f"{section}.{key}") for key in expected} == expected
    assert (found["prompts_per_step"], found["minibatches"], found["max_steps"]) == (32, 2, 500)
    assert (found["micro_batch_tokens"], found["evaluation.temperature"]) == (2048, 1.0)
    assert (found["dataset.source"], found["rewards"]) == ("OpenMathInstruct-2", [{"reward": "math_verify"}])
    assert found["logging.wandb"] and found["checkpoint.every"] == 10


RISE = {"name": "x.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}}
FALL = {"name": "x.CosineAnnealingLR", "kwargs": {"eta_min": 0.25}}
COSINE = {
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 5,
    "optimizer.min_learning_rate_ratio": 0.5,
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("grpo.max_num_steps", 1_000_000, {}),
        ("grpo.adv_estimator.name", "reinforce", {}),
        ("grpo.normalize_rewards", False, {"advantage.scale_rewards": "none"}),
        ("loss_fn.use_cispo", True, {"loss.loss_type": "cispo"}),
        ("loss_fn.token_level_loss", False, {"loss.loss_type": "grpo"}),
        ("loss_fn.use_importance_sampling_correction", False, {"loss.sampler_correction": "none"}),
        ("loss_fn.use_importance_sampling_correction", True, {}),  # without bounds
        ("policy.train_global_batch_size", 32, {}),  # of an unknown number of completions
        ("policy.optimizer.name", "torch.optim.SGD", {}),
        ("policy.generation.stop_strings", ["a"], {"rollout.stop": ["a"]}),
        ("policy.generation.backend", "megatron", {"rollout.engine": "transformers"}),
        ("data.train.output_key", "solution", {"dataset.rename": {"solution": "answer"}}),
        ("policy.scheduler", [RISE, FALL], COSINE),
        ("policy.scheduler", [{"name": "x.StepLR", "kwargs": {}}], {}),
        ("checkpointing.enabled", False, {}),
    ],
)
def test_a_nemo_rl_value_is_put_in_our_terms_or_left(key, value, expected):
    document: dict[str, Any] = {"policy": {"model_name": "a/b", "optimizer": {"kwargs": {"lr": 0.5}}}}
    *way, last = key.split(".")
    node = document
    for part in way:
        node = node.setdefault(part, {})
    node[last] = value

    conversion = convert(document, source="nemo_rl")

    row = next(row for row in conversion.rows if row.key == key)
    assert {place: conversion.places[place] for place in row.places} == expected
    assert (row.outcome == "not applicable") == (not expected)


def test_every_nemo_rl_leaf_is_in_the_account():
    rows = outcomes(NEMO)

    assert set(flatten(yaml.safe_load(NEMO))) == set(rows)
    assert rows["made_up.key"] == rows["policy.megatron_cfg.optimizer.lr"] == "not applicable"


def test_nemo_rls_one_section_form_takes_both_its_own_and_the_common_names():
    text = "algorithm: {name: grpo, num_generations_per_prompt: 4, ratio_clip_min: 0.1, beta: 0.02, odd: 1}\n"
    text += "policy: {model_name: a/b}"
    found = places(text)

    assert found["rollout.num_generations"] == 4
    assert (found["loss.epsilon_low"], found["loss.beta"]) == (0.1, 0.02)
    assert outcomes(text)["algorithm.odd"] == "not applicable"


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {name: dpo, beta: 0.2, loss_type: ipo}\npolicy: {model_name: a/b}",
        "dpo: {reference_policy_kl_penalty: 0.2}\npolicy: {model_name: a/b}",
        "base_model: a/b\nrl: dpo\nrl_beta: 0.2\ntrl: {max_completion_length: 9}",
        "{beta: 0.2, loss_type: [sigmoid], truncation_mode: keep_start, model_name_or_path: a/b}",
    ],
)
def test_preference_terms_are_not_taken_for_grpos(text):
    found = places(text)

    assert found["algorithm"] == "dpo"
    assert found["preference.loss.beta"] == 0.2
    assert not any(place.split(".")[0] in ("loss", "rollout", "rewards") for place in found)


def test_trls_preference_losses_keep_their_names_but_for_a_smoothed_sigmoid():
    smoothed = places({"loss_type": ["sigmoid"], "label_smoothing": 0.1, "truncation_mode": "keep_start"})
    assert smoothed["preference.loss.loss_type"] == "cdpo"
    assert smoothed["preference.loss.label_smoothing"] == 0.1
    several = places({"loss_type": ["sigmoid", "sft"], "truncation_mode": "keep_start"})
    assert several["preference.loss.loss_type"] == ["sigmoid", "sft"]
    unknown = {"loss_type": ["nca_pair"], "truncation_mode": "keep_start"}
    assert outcomes(unknown)["loss_type"] == "not applicable"


def test_trls_batch_sizes_become_prompts_and_minibatches_and_its_steps_rollouts():
    found = places(
        {
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "num_iterations": 2,
            "max_steps": 100,
            "save_steps": 50,
            "warmup_steps": 7,
        }
    )
    assert (found["prompts_per_step"], found["minibatches"]) == (8, 2)
    assert (found["max_steps"], found["checkpoint.every"], found["optimizer.warmup_steps"]) == (25, 13, 2)


def test_trls_batch_sizes_that_do_not_divide_are_left_with_the_reason():
    document = {"num_generations": 8, "per_device_train_batch_size": 3}
    assert outcomes(document)["per_device_train_batch_size"] == "not applicable"
    assert "prompts_per_step" not in places(document)


def test_trls_defaults_that_differ_from_ours_are_written_down_where_no_key_set_them():
    found = places({"num_generations": 8, "use_vllm": True, "beta": 0.1, "adam_beta1": 0.8})
    assert found["rollout.max_completion_length"] == 512
    assert found["optimizer.schedule"] == "linear"
    assert found["optimizer.betas"] == [0.8, 0.999]
    assert found["loss.sampler_correction"] == "sequence_mask"
    assert found["loss.use_bias_correction_kl"] is True
    assert (found["prompts_per_step"], found["minibatches"]) == (1, 1)


def test_terms_that_the_chosen_loss_does_not_read_are_left_with_the_reason():
    document = {"num_generations": 8, "epsilon": 0.2, "sapo_temperature_pos": 0.9, "loss_type": "sapo"}
    assert outcomes(document)["epsilon"] == "not applicable"
    assert places(document)["loss.sapo_temperature_pos"] == 0.9


def test_two_keys_for_one_place_with_different_values_are_told():
    conversion = convert({"num_generations": 8, "bf16": True, "dtype": "float32"})
    reasons = {row.key: row.reason for row in conversion.rows}
    assert "model.dtype" in reasons["dtype"] and "bf16" in reasons["dtype"]


@pytest.mark.parametrize("text", [AXOLOTL, NEMO, "num_generations: 4"])
def test_the_outcome_loads_and_a_person_fills_in_what_is_missing(text, tmp_path):
    foreign, ours = tmp_path / "foreign.yaml", tmp_path / "ours.yaml"
    foreign.write_text(text, encoding="utf-8")

    conversion, converted = convert_file(foreign)
    ours.write_text(converted, encoding="utf-8")

    load_config(ours)
    assert all(name in converted and name in conversion.listing() for name in conversion.fill_in)
    if text == "num_generations: 4":
        assert conversion.fill_in == ("model.path", "dataset.source", "rewards", "max_steps")


@pytest.mark.parametrize("text", ['{"num_generations": 1}', "[1, 2]", "{", "a: [1"])
@pytest.mark.parametrize("name", ["file.json", "file.yaml"])
def test_a_file_without_a_mapping_or_with_a_value_that_is_refused_here_is_an_error(text, name, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        convert_file(tmp_path / name)


def test_a_token_is_not_shown():
    assert "hf_secret" not in convert({"num_generations": 8, "hub_token": "hf_secret"}).listing()


def test_the_source_is_told_by_its_keys():
    assert recognise(yaml.safe_load(AXOLOTL)) == "axolotl"
    assert recognise(yaml.safe_load(NEMO)) == "nemo_rl"
    assert recognise({"num_generations": 8}) == "trl"
    with pytest.raises(ValueError, match="model and dataset"):
        recognise({"model": {}, "dataset": {}})


def test_a_nemo_rl_file_inherits_from_the_one_beside_it(tmp_path: Path):
    (tmp_path / "parent.yaml").write_text(NEMO, encoding="utf-8")
    child = tmp_path / "child.yaml"
    child.write_text("defaults: parent.yaml\ngrpo: {num_generations_per_prompt: 8}\n", encoding="utf-8")

    found = convert_file(child)[0].places

    assert (found["rollout.num_generations"], found["prompts_per_step"]) == (8, 32)


def test_references_resolve_and_circles_end():
    leaves = {
        "a.b": 3,
        "a.c": "${.b}",
        "d": "${mul:${a.b}, ${a.c}}",
        "e": "x-${a.b}",
        "f": "${f}",
        "g": "${none}",
    }
    assert resolve(leaves) == {"a.b": 3, "a.c": 3, "d": 9, "e": "x-3", "f": "${f}", "g": "${none}"}


@pytest.mark.parametrize("name", ["GRPOConfig", "DPOConfig"])
def test_every_field_of_the_real_trl_is_in_the_table_and_in_the_account(name, tmp_path):
    trl = pytest.importorskip("trl")
    names = {field.name for field in dataclasses.fields(getattr(trl, name))}
    assert names <= set(NAMES)
    path = tmp_path / "trl.json"
    config = getattr(trl, name)(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")

    rows = convert_file(path)[0].rows

    assert set(config.to_dict()) <= {row.key for row in rows}
