"""Foreign configurations: every key in the account, the right places, an outcome that loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from grpo_fast.config_io import ConfigError, load_config
from grpo_fast.config_io.foreign_names import RULES
from grpo_fast.convert import Conversion, convert, convert_file
from grpo_fast.convert.api import recognise
from grpo_fast.convert.references import flatten, resolve

AXOLOTL = """
base_model: Qwen/Qwen2.5-1.5B-Instruct
rl: grpo
chat_template: tokenizer_default
vllm: {host: 0.0.0.0, port: 8000, gpu_memory_utilization: 0.85}
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
trl:
  use_vllm: true
  vllm_server_host: 0.0.0.0
  use_data_producer: true
  num_generations: 8
  max_completion_length: 512
  temperature: 0.7
  epsilon_high: 0.28
  reward_funcs: [rewards.accuracy_reward, rewards.format_reward]
  reward_weights: [1.0, 0.5]
datasets:
  - {path: openai/gsm8k, name: main, split: train, type: rewards.prompt_transform}
val_set_size: 0.0
sequence_len: 512
micro_batch_size: 8
gradient_accumulation_steps: 4
max_steps: 200
learning_rate: 5.0e-6
optimizer: adamw_torch_fused
warmup_steps: 10
bf16: true
output_dir: ./grpo-output
made_up_key: 3
"""

NEMO = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_num_steps: 500
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  overlong_filtering: true
  seed: 42
  async_grpo: {enabled: false}
loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28
  ratio_clip_c: 3.0
  use_importance_sampling_correction: true
  truncated_importance_sampling_type: tis
  truncated_importance_sampling_ratio: 2.0
  sequence_level_importance_ratios: false
  token_level_loss: true
checkpointing: {enabled: true, checkpoint_dir: results/grpo, keep_top_k: 3, save_period: 10}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 256
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg:
    activation_checkpointing: true
    lora_cfg: {enabled: true, dim: 8, alpha: 32, match_all_linear: true, target_modules: []}
  megatron_cfg: {enabled: false, optimizer: {lr: 5.0e-6}}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8, foreach: false}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    val_temperature: ${.temperature}
    top_k: null
    vllm_cfg: {gpu_memory_utilization: 0.6}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}
  default: {prompt_file: examples/prompts/cot.txt}
env: {math: {num_workers: 8, math_verify_impl: hf_math_verify}}
logger: {wandb_enabled: true, wandb: {project: grpo-dev}}
cluster: {gpus_per_node: 1}
made_up: {key: 3}
"""


def parse(text: str) -> dict:
    from grpo_fast.config_io.yaml_text import parse_yaml

    return parse_yaml(text, "test")


def outcomes(conversion: Conversion) -> dict[str, str]:
    return {row.key: row.outcome for row in conversion.rows}


def test_an_axolotl_run_finds_its_places():
    places = convert(parse(AXOLOTL)).places

    assert places["model.path"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert places["model.lora.r"] == 32
    assert places["model.lora.target_modules"] == "all-linear"
    assert places["dataset.source"] == "openai/gsm8k"
    assert places["rewards"] == [
        {"reward": "rewards:accuracy_reward", "weight": 1.0},
        {"reward": "rewards:format_reward", "weight": 0.5},
    ]
    assert places["prompts_per_step"] == 8 * 4 // 8
    assert places["loss.epsilon_high"] == 0.28
    assert places["optimizer.schedule"] == "cosine"  # Axolotl's own default
    assert places["optimizer.betas"] == [0.9, 0.999]


def test_every_axolotl_key_is_in_the_account():
    document = parse(AXOLOTL)
    rows = outcomes(convert(document))

    wanted = {key for key in document if key not in ("trl", "vllm", "datasets")}
    wanted |= {f"trl.{key}" for key in document["trl"]} | {f"vllm.{key}" for key in document["vllm"]}
    wanted |= {f"datasets.0.{key}" for key in document["datasets"][0]}
    assert wanted <= set(rows)
    assert rows["made_up_key"] == rows["trl.use_data_producer"] == "not applicable"
    assert all(row.reason for row in convert(document).rows if row.outcome == "not applicable")


def test_axolotls_lora_settings_count_only_with_its_adapter():
    document = parse(AXOLOTL)
    del document["adapter"], document["lora_target_linear"]
    assert not any(place.startswith("model.lora") for place in convert(document).places)


def test_a_nemo_rl_run_finds_its_places():
    places = convert(parse(NEMO)).places

    expected = {
        "prompts_per_step": 32,
        "rollout.num_generations": 16,
        "minibatches": 2,
        "max_steps": 500,
        "advantage.baseline": "leave_one_out",
        "advantage.mask_truncated": True,
        "loss.loss_type": "dapo",
        "loss.beta": 0.01,
        "loss.epsilon_high": 0.28,
        "loss.delta": 3.0,
        "loss.sampler_correction": "token_truncate",
        "loss.sampler_clip_max": 2.0,
        "micro_batch_tokens": 2048,
        "rollout.max_completion_length": 512,
        "rollout.engine": "vllm",
        "evaluation.temperature": 1.0,
        "model.gradient_checkpointing": True,
        "model.lora.r": 8,
        "optimizer.warmup_steps": 50,
        "optimizer.schedule": "constant",
        "optimizer.learning_rate": 5e-6,
        "dataset.source": "OpenMathInstruct-2",
        "rewards": [{"reward": "math_verify"}],
        "logging.wandb": True,
        "checkpoint.every": 10,
    }
    assert {place: places.get(place) for place in expected} == expected


def test_every_nemo_rl_leaf_is_in_the_account():
    document = parse(NEMO)
    rows = outcomes(convert(document))

    assert set(flatten(document)) == set(rows)
    assert rows["made_up.key"] == rows["policy.megatron_cfg.optimizer.lr"] == "not applicable"


def test_nemo_rls_one_section_form_takes_both_its_own_and_the_common_names():
    text = "algorithm: {name: grpo, num_generations_per_prompt: 4, ratio_clip_min: 0.1, beta: 0.02, odd: 1}\n"
    conversion = convert(parse(text + "policy: {model_name: a/b}"))

    assert conversion.places["rollout.num_generations"] == 4
    assert conversion.places["loss.epsilon_low"] == 0.1
    assert conversion.places["loss.beta"] == 0.02
    assert outcomes(conversion)["algorithm.odd"] == "not applicable"


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
    places = convert(parse(text)).places

    assert places["algorithm"] == "dpo"
    assert places["preference.loss.beta"] == 0.2
    assert not any(place.split(".")[0] in ("loss", "rollout", "rewards") for place in places)


def test_trls_sigmoid_with_smoothed_labels_is_cdpo():
    document = {"loss_type": ["sigmoid"], "label_smoothing": 0.1, "truncation_mode": "keep_start"}
    places = convert(document).places
    assert places["preference.loss.loss_type"] == "cdpo"
    assert places["preference.loss.label_smoothing"] == 0.1


def test_a_preference_loss_that_is_not_offered_is_left_with_the_reason():
    conversion = convert({"loss_type": ["nca_pair"], "truncation_mode": "keep_start"})
    assert outcomes(conversion)["loss_type"] == "not applicable"


def test_trls_batch_sizes_become_prompts_and_minibatches_and_its_steps_rollouts():
    document = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 100,
    }
    places = convert(document).places
    assert (places["prompts_per_step"], places["minibatches"], places["max_steps"]) == (8, 2, 25)


def test_trls_batch_sizes_that_do_not_divide_are_left_with_the_reason():
    conversion = convert({"num_generations": 8, "per_device_train_batch_size": 3})
    assert outcomes(conversion)["per_device_train_batch_size"] == "not applicable"
    assert "prompts_per_step" not in conversion.places


def test_trls_defaults_that_differ_from_ours_are_written_down():
    places = convert({"num_generations": 8, "use_vllm": True, "beta": 0.1}).places
    assert places["rollout.max_completion_length"] == 512
    assert places["optimizer.schedule"] == "linear"
    assert places["loss.sampler_correction"] == "sequence_mask"
    assert places["loss.use_bias_correction_kl"] is True


def test_terms_that_the_chosen_loss_does_not_read_are_left_with_the_reason():
    conversion = convert(
        {"num_generations": 8, "loss_type": "sapo", "epsilon": 0.2, "sapo_temperature_pos": 0.9}
    )
    assert outcomes(conversion)["epsilon"] == "not applicable"
    assert conversion.places["loss.sapo_temperature_pos"] == 0.9


def test_two_keys_for_one_place_with_different_values_are_told():
    conversion = convert({"num_generations": 8, "bf16": True, "dtype": "float32"})
    reasons = {row.key: row.reason for row in conversion.rows}
    assert "model.dtype is 'bfloat16' by bf16" in reasons["dtype"]


@pytest.mark.parametrize("text", [AXOLOTL, NEMO, "num_generations: 4"])
def test_the_outcome_loads(text, tmp_path):
    out = tmp_path / "ours.yaml"
    out.write_text(convert(parse(text)).yaml(), encoding="utf-8")
    load_config(out)


def test_what_is_missing_is_named_and_stands_in_the_file():
    conversion = convert({"num_generations": 4})
    assert conversion.fill_in == ("model.path", "dataset.source", "rewards", "max_steps")
    assert "# To fill in: model.path, dataset.source, rewards, max_steps." in conversion.yaml()
    assert "to fill in" in conversion.listing()


def test_a_value_that_is_refused_here_is_an_error():
    with pytest.raises(ConfigError, match=r"rollout\.num_generations = 1"):
        convert({"num_generations": 1, "per_device_train_batch_size": 8})


def test_a_token_is_not_shown():
    assert "hf_secret" not in convert({"num_generations": 8, "hub_token": "hf_secret"}).listing()


def test_the_source_is_told_by_its_keys():
    assert recognise(parse(AXOLOTL)) == "axolotl"
    assert recognise(parse(NEMO)) == "nemo_rl"
    assert recognise({"num_generations": 8}) == "trl"


def test_a_nemo_rl_file_inherits_from_the_one_beside_it(tmp_path: Path):
    (tmp_path / "parent.yaml").write_text(NEMO, encoding="utf-8")
    child = tmp_path / "child.yaml"
    child.write_text("defaults: parent.yaml\ngrpo: {num_generations_per_prompt: 8}\n", encoding="utf-8")

    places = convert_file(child).places

    assert places["rollout.num_generations"] == 8
    assert places["prompts_per_step"] == 32


@pytest.mark.parametrize("text", ["[1, 2]", "{", "a: [1"])
def test_a_file_that_holds_no_mapping_is_refused(text, tmp_path):
    for name in ("file.json", "file.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError):
            convert_file(tmp_path / name)


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
def test_every_field_of_the_real_trl_is_in_the_table(name):
    trl = pytest.importorskip("trl")
    names = {field.name for field in dataclasses.fields(getattr(trl, name))}
    assert names - set(RULES) - {"loss_weights"} == set()


@pytest.mark.parametrize("name", ["GRPOConfig", "DPOConfig"])
def test_a_real_trl_configuration_converts_with_every_key_in_the_account(name, tmp_path):
    trl = pytest.importorskip("trl")
    path = tmp_path / "trl.json"
    config = getattr(trl, name)(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")

    conversion = convert_file(path)

    assert set(config.to_dict()) <= set(outcomes(conversion))
