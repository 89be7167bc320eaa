"""What people publish for the peers starts here, and means what it meant there."""

from __future__ import annotations

import random
import re

import pytest
import yaml

from grpo_fast import cli
from grpo_fast.config_io import convert_file, load_config
from grpo_fast.convert import Conversion
from grpo_fast.rewards.config import RewardConfig
from grpo_fast.rewards.loading import load_function


def run(tmp_path, text: str, name: str = "foreign.yaml") -> Conversion:
    """The conversion of a file, after its outcome has loaded."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    conversion, written = convert_file(tmp_path / name)
    (tmp_path / "run.yaml").write_text(written, encoding="utf-8")
    load_config(tmp_path / "run.yaml")
    for row in conversion.rows:
        assert row.key in conversion.listing()
        assert row.reason or row.outcome in ("taken", "renamed"), row
        assert row.outcome != "needs a decision" or row.key in written
    return conversion


def decisions(conversion: Conversion) -> dict[str, str]:
    return {row.key: row.reason for row in conversion.rows if row.outcome == "needs a decision"}


# ------------------------------------------------------------------------------------------ TRL and open-r1

MATH_RECIPE = """
model_name_or_path: org/small-instruct
dataset_name: org/math-problems
dataset_prompt_column: problem
system_prompt: "Think in <think> tags.\\nThen answer."
use_vllm: true
max_steps: -1
num_train_epochs: 1
num_generations: 16
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
overwrite_output_dir: true
push_to_hub: true
warmup_ratio: 0.1
save_strategy: epoch
benchmarks: [some_bench]
reward_funcs: [accuracy, format, tag_count]
reward_weights: [1.0, 0.5, 0.25]
"""


def test_a_recipe_of_epochs_and_named_rewards_keeps_its_meaning_or_asks(tmp_path):
    found = run(tmp_path, MATH_RECIPE)
    assert found.places["dataset.prompt_column"] == "problem"
    assert found.places["prompts_per_step"] == 16 * 4 // 16
    assert [entry["weight"] for entry in found.places["rewards"]] == [1.0, 0.5, 0.25]
    assert found.places["rewards"][0]["reward"] == "open_r1.rewards:accuracy_reward"
    assert found.fill_in == ("max_steps",)
    asked = decisions(found)
    assert asked.keys() == {"num_train_epochs", "warmup_ratio", "save_strategy", "benchmarks"}
    assert "max_steps" in asked["num_train_epochs"] and "optimizer.warmup_steps" in asked["warmup_ratio"]
    assert "open_r1 must be installed" in found.listing()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{max_steps: 500, warmup_ratio: 0.03, save_steps: 0.05}", {"optimizer.warmup_steps": 15}),
        ("{max_steps: 500, save_steps: 0.05}", {"checkpoint.every": 25}),
        ("{max_steps: 33, warmup_ratio: 0.1}", {"optimizer.warmup_steps": 4}),  # rounded up, as HF does
        ("{max_steps: 5, num_train_epochs: 3}", {"max_steps": 5}),
        ("{vllm_gpu_memory_utilization: 0.3}", {"rollout.vllm.gpu_memory_utilization": 0.3}),
        ("{loss_type: cispo, epsilon_high: 5.0}", {"loss.epsilon_high": 5.0}),  # absolute there too
        ("{beta: 0.04}", {"loss.beta": 0.04, "advantage.skip_flat_groups": False}),
    ],
)
def test_a_trl_value_is_ours_and_nothing_is_left_to_decide(text, expected, tmp_path):
    found = run(tmp_path, f"num_generations: 8\n{text[1:-1].replace(', ', chr(10))}")
    assert {place: found.places[place] for place in expected} == expected
    assert not decisions(found)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("reward_funcs", "[code, format]", ["code", "module:function"]),
        ("reward_funcs", "org/reward-model", ["reward model", "module:function"]),
        ("reward_funcs", "[]", []),
        ("vllm_tensor_parallel_size", "2", ["several ranks"]),
        ("per_device_train_batch_size", "9", ["prompts_per_step"]),
        ("num_generations", "1", ["rollout.num_generations", "2"]),
        ("load_in_4bit", "true", ["quantised"]),
        ("warmup_steps", "50", ["optimizer.warmup_steps = 50", "max_steps = 20"]),
        ("lr_scheduler_type", "polynomial", ["constant, linear or cosine"]),
        ("temperature", "-1", ["rollout.temperature"]),
    ],
)
def test_a_trl_value_without_an_equivalent_asks_for_a_decision_and_the_rest_is_converted(
    key, value, words, tmp_path
):
    text = yaml.safe_dump({"max_steps": 20, "num_generations": 8} | {key: yaml.safe_load(value)})
    found = run(tmp_path, text)
    assert found.places["max_steps"] == 20
    if words:
        assert all(word in decisions(found)[key] for word in words)


def test_the_think_format_of_trl_and_of_open_r1_score_every_text_alike(tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "\n", "x", " "]
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 9))) for _ in range(4000)]
    texts += ["<think>\na\n</think>\n<answer>\nb\n</answer>", "<think>a</think>b", "<think>\na\n</think>\n"]
    texts += [f"{texts[-3]}\nmore", f"{texts[-3]} more"]
    flags = re.DOTALL | re.MULTILINE
    published = {
        "think_format_reward": r"^<think>(?!.*<think>)(.*?)</think>.*$",
        "format": r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$",
    }
    for name, pattern in published.items():
        found = run(tmp_path, f"num_generations: 8\nreward_funcs: [{name}]")
        config = RewardConfig(**found.places["rewards"][0])
        _, score, _ = load_function(config.reward, config.options)
        assert score(completions=texts) == [float(bool(re.match(pattern, text, flags))) for text in texts]
        assert 0 < sum(score(completions=texts)) < len(texts)


@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"])
def test_trls_rewards_by_name_score_like_trls_own(name, tmp_path):
    trl = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    theirs = getattr(trl, name)
    theirs = theirs(max_completion_len=1280, soft_punish_cache=256) if name.startswith("get_") else theirs
    config = RewardConfig(**run(tmp_path, f"num_generations: 8\nreward_funcs: {name}").places["rewards"][0])
    _, ours, _ = load_function(config.reward, config.options)
    texts = [r"<think>a</think>\boxed{4}", r"\boxed{5}", "4", "<think>a<think></think>"]
    batch = {
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "solution": ["$4$"] * 4,
        "completion_ids": [[0] * n for n in (10, 1024, 1100, 2000)],
    }
    assert ours(**batch) == theirs(**batch)


# ------------------------------------------------------------------------------------------------- Axolotl

AXOLOTL_RUN = """
base_model: org/small-instruct
rl: grpo
wandb_project: my-runs
vllm: {host: 0.0.0.0, port: 8000, tensor_parallel_size: 2, gpu_memory_utilization: 0.85, max_model_len: 2048,
       dtype: auto}
trl: {use_vllm: true, num_generations: 8, reward_funcs: [rwd.right]}
datasets: [{path: org/sums, name: main, split: "train[:1000]", type: rwd.as_prompt}]
micro_batch_size: 8
max_steps: 100
special_tokens: {pad_token: "<pad>"}
"""


def test_an_axolotl_run_keeps_its_vllm_settings_and_its_tracker_and_asks_for_its_transform(tmp_path):
    found = run(tmp_path, AXOLOTL_RUN)
    expected = {
        "logging.wandb": True,
        "logging.project": "my-runs",
        "rollout.vllm.gpu_memory_utilization": 0.85,
        "rollout.vllm.max_model_length": 2048,
        "prompts_per_step": 1,
    }
    assert {place: found.places.get(place) for place in expected} == expected
    assert decisions(found).keys() == {"datasets.0.type", "vllm.tensor_parallel_size"}
    assert "prompt_column" in decisions(found)["datasets.0.type"]
    assert "share the GPU" in found.listing()


@pytest.mark.parametrize(
    ("line", "on"),
    [("", True), ("use_wandb: false", False), ("wandb_mode: disabled", False), ("use_wandb: true", True)],
)
def test_an_axolotl_project_turns_wandb_on_unless_another_key_turns_it_off(line, on, tmp_path):
    found = run(tmp_path, f"base_model: m\nrl: grpo\nwandb_project: p\n{line}\n")
    assert found.places["logging.wandb"] is on


# ------------------------------------------------------------------------------------------------- NeMo-RL

NEMO_RUN = """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 8, max_num_steps: 20, val_period: -1}
checkpointing: {enabled: false, save_period: 10}
policy:
  model_name: org/small
  train_global_batch_size: 32
  precision: bfloat16
  dtensor_cfg: {enabled: false, activation_checkpointing: true}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6}}
  megatron_cfg: {enabled: true, activation_checkpointing: false,
                 optimizer: {optimizer: adam, lr: 3.0e-7, adam_beta2: 0.98},
                 scheduler: {lr_decay_style: constant, lr_warmup_iters: 50}}
  generation: {backend: vllm, max_new_tokens: 64,
               vllm_cfg: {tensor_parallel_size: 4, gpu_memory_utilization: 0.7, max_model_len: 128}}
loss_fn: {ratio_clip_min: 1.0, ratio_clip_max: 5.0, use_cispo: true, token_level_loss: true}
data: {train: {dataset_name: gsm8k}, default: {prompt_file: prompts/cot.txt, env_name: math}}
env: {math: {math_verify_impl: hf_math_verify}}
"""


def test_a_nemo_rl_run_on_megatron_takes_megatrons_settings_and_not_the_inherited_ones(tmp_path):
    found = run(tmp_path, NEMO_RUN)
    expected = {
        "optimizer.learning_rate": 3e-7,
        "optimizer.betas": [0.9, 0.98],
        "model.gradient_checkpointing": False,
        "loss.loss_type": "cispo",
        "loss.epsilon_high": 6.0,  # written as a distance from 1 there, absolute here
        "loss.epsilon_low": ...,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "rollout.vllm.gpu_memory_utilization": 0.7,
        "rollout.vllm.max_model_length": 128,
        "dataset.source": "openai/gsm8k",
        "dataset.prompt_column": "question",
        "rewards": [{"reward": "math_verify"}],
        "optimizer.warmup_steps": ...,  # 50 of 20 steps
    }
    assert {place: found.places.get(place, ...) for place in expected} == expected
    assert {
        "policy.generation.vllm_cfg.tensor_parallel_size",
        "policy.megatron_cfg.scheduler.lr_warmup_iters",
        "data.default.prompt_file",
    } == decisions(found).keys()


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("loss_fn: {use_cispo: true, ratio_clip_min: 0.2}", "loss_fn.ratio_clip_min"),
        ("data: {default: {env_name: code}}", "data.default.env_name"),
        ("data: {train: {dataset_name: squad}}", "data.train.dataset_name"),
        ("data: {train: [{dataset_name: gsm8k}, {dataset_name: DeepScaler}]}", "data.train"),
        ("env: {math: {math_verify_impl: dapo_math_verify}}", "env.math.math_verify_impl"),
        ("grpo: {max_rollout_turns: 50}", "grpo.max_rollout_turns"),
        ("grpo: {reward_shaping: {enabled: true, overlong_buffer_length: 8}}", "grpo.reward_shaping.enabled"),
        ("data: {shuffle: false}", "data.shuffle"),
        ("env: {math: {num_workers: '${some.where}'}}", "env.math.num_workers"),
    ],
)
def test_what_nemo_rl_would_do_otherwise_asks_for_a_decision(extra, key, tmp_path):
    found = run(tmp_path, f"policy: {{model_name: a/b}}\n{extra}\n")
    assert decisions(found).keys() == {key}


def test_a_converted_file_says_what_is_to_be_decided_and_the_command_ends_well(tmp_path, capsys):
    (tmp_path / "foreign.yaml").write_text(MATH_RECIPE, encoding="utf-8")
    out = tmp_path / "run.yaml"
    assert cli.main(["convert", str(tmp_path / "foreign.yaml"), "-o", str(out)]) == 0
    listing = capsys.readouterr().err
    assert listing.index("needs a decision") > listing.index("not applicable")
    heading = [line for line in out.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any("num_train_epochs = 1" in line and "max_steps" in line for line in heading)
    assert heading[-1] == "# To fill in: max_steps."
