"""What people publish for the peers starts here, and means what it meant there."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import yaml

from grpo_fast import cli
from grpo_fast.config_io import ConfigError, convert_file, load_config
from grpo_fast.convert import Conversion
from grpo_fast.convert.command import read_command
from grpo_fast.rewards.config import RewardConfig
from grpo_fast.rewards.loading import load_function


def run(tmp_path, text: str, name: str = "foreign.yaml") -> Conversion:
    """The conversion of a file, after its outcome has loaded."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    conversion, written = convert_file(tmp_path / name)
    if "max_steps" in conversion.fill_in:
        (tmp_path / "run.yaml").write_text(written, encoding="utf-8")
        with pytest.raises(ConfigError, match="max_steps = 'FILL_IN': is to be filled in"):
            load_config(tmp_path / "run.yaml")
        written = written.replace("max_steps: FILL_IN", "max_steps: 100")
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
    assert found.places["epochs"] == 1 and "max_steps" not in found.places and not found.fill_in
    asked = decisions(found)
    assert asked.keys() == {*found.open} == {"warmup_ratio", "save_strategy", "benchmarks"}
    assert "optimizer.warmup_steps" in asked["warmup_ratio"]
    assert "open_r1 must be installed" in found.listing()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("reward_funcs", "[code, format]", ["code", "module:function"]),
        ("reward_funcs", "org/reward-model", ["reward model", "module:function"]),
        ("reward_funcs", "[]", []),
        ("per_device_train_batch_size", "9", ["prompts_per_step"]),
        ("gradient_accumulation_steps", "auto", ["prompts_per_step"]),
        ("adam_beta1", "fast", ["optimizer.betas.0"]),
        ("num_generations", "1", ["rollout.num_generations", "2"]),
        ("load_in_8bit", "true", ["quantised"]),
        ("warmup_steps", "50", ["optimizer.warmup_steps = 50", "max_steps = 20"]),
        ("lr_scheduler_type", "polynomial", ["constant, linear or cosine"]),
        ("temperature", "-1", ["rollout.temperature"]),
        ("max_tool_calling_iterations", "3", ["rollout.max_turns = 4", "rollout.environment"]),
        ("rollout_func", "games.play", ["rollout.function"]),
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


def test_trls_default_bound_of_cispo_and_its_ratio_of_luspo_are_asked_about(tmp_path):
    asked = {
        name: decisions(run(tmp_path, f"num_generations: 8\nloss_type: {name}"))
        for name in ("cispo", "luspo")
    }
    assert "would bound every weight" in asked["cispo"]["epsilon_high"]
    assert "importance_sampling_level" in asked["luspo"]


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
adapter: lora
lora_r: 32
lora_target_linear: true
made_up_key: 3
wandb_project: my-runs
vllm: {host: 0.0.0.0, port: 8000, tensor_parallel_size: 2, gpu_memory_utilization: 0.85, max_model_len: 2048,
       dtype: auto}
trl: {use_vllm: true, num_generations: 8, epsilon_high: 0.28, use_data_producer: true,
      reward_funcs: [rwd.right, rwd.format], reward_weights: [1.0, 0.5]}
datasets: [{path: org/sums, name: main, split: "train[:1000]", type: rwd.as_prompt}]
micro_batch_size: 8
max_steps: 100
special_tokens: {pad_token: "<pad>"}
"""


def test_an_axolotl_run_finds_its_places_and_asks_for_its_transform(tmp_path):
    found = run(tmp_path, AXOLOTL_RUN)
    rewards = [{"reward": "rwd:right", "weight": 1.0}, {"reward": "rwd:format", "weight": 0.5}]
    expected = {
        "model.path": "org/small-instruct",
        "model.lora.r": 32,
        "model.lora.target_modules": "all-linear",
        "dataset.source": "org/sums",
        "rewards": rewards,
        "loss.epsilon_high": 0.28,
        "optimizer.schedule": "cosine",  # Axolotl's own default
        "optimizer.betas": [0.9, 0.999],
        "logging.wandb": True,
        "logging.project": "my-runs",
        "rollout.vllm.gpu_memory_utilization": 0.85,
        "rollout.vllm.max_model_length": 2048,
        "prompts_per_step": 1,
    }
    assert {place: found.places.get(place) for place in expected} == expected
    assert decisions(found).keys() == {"datasets.0.type", "made_up_key"}
    outcomes = {row.key: row.outcome for row in found.rows}
    document = yaml.safe_load(AXOLOTL_RUN)
    blocks = {f"{block}.{key}" for block in ("trl", "vllm") for key in document[block]}
    assert {*document, *blocks} - {"trl", "vllm", "datasets"} <= outcomes.keys()
    assert outcomes["trl.use_data_producer"] == "not applicable"
    assert "rollout.vllm.tensor_parallel_size" in found.listing()
    assert "prompt_column" in decisions(found)["datasets.0.type"]
    assert "share the GPU" in found.listing()


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
        "policy.megatron_cfg.scheduler.lr_warmup_iters",
        "data.default.prompt_file",
    } == decisions(found).keys()


# ---------------------------------------------------------------------------------- verl, and commands at all

VERL_RUN = """
#!/bin/bash
# comment with an unbalanced ' quote
set -x
MODEL=${MODEL:-"org/small-instruct"}   # from the environment, else this
length=$((1024 * 2))
total=$(( (256 + length) * 2 ))
stamp=$(date +%Y)
offload=False
cat > prepare.py << EOF
print('it is "not" a command: data.train_batch_size=3')
EOF
python3 prepare.py --local_dir ~/data

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['$HOME/data/sums.parquet']" \\
    data.val_files=data/held_out.parquet \\
    data.train_batch_size=64 \\
    data.max_response_length=${length} data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.enable_activation_offload=True \\
    # actor_rollout_ref.rollout.n=99 \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$total \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    +actor_rollout_ref.actor.fsdp_config.param_offload=$offload \\
    actor_rollout_ref.actor.optim.optimizer=AdamW8bit \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.logger='["console","wandb"]' trainer.project_name="sums-${stamp}" \\
    trainer.total_training_steps=50 trainer.total_epochs=15 trainer.save_freq=-1 $@ 2>&1 | tee run.log
"""


def test_a_verl_script_converts_with_its_variables_and_its_defaults(tmp_path):
    found = run(tmp_path, VERL_RUN, "run.sh")
    expected = {
        "model.path": "org/small-instruct",
        "model.gradient_checkpointing": "offload",
        "optimizer.kind": "adamw_8bit",
        "dataset.source": "~/data/sums.parquet",
        "dataset.overlong_prompts": "filter",
        "evaluation.dataset.source": "data/held_out.parquet",
        "prompts_per_step": 64,
        "minibatches": 4,  # verl's mini-batch counts prompts
        "rollout.num_generations": 5,
        "rollout.max_completion_length": 2048,
        "dataset.max_prompt_length": 512,  # a default
        "micro_batch_tokens": (256 + 2048) * 2,
        "max_steps": 50,
        "optimizer.warmup_steps": 5,
        "optimizer.weight_decay": 0.01,
        "loss.loss_type": "dapo",
        "loss.beta": 0.001,
        "loss.kl_estimator": "k3",
        "loss.delta": 3.0,
        "loss.sampler_correction": "none",
        "checkpoint.every": 0,
        "logging.wandb": True,
        "rewards": [{"reward": "FILL_IN"}],
    }
    assert {place: found.places.get(place) for place in expected} == expected
    assert decisions(found).keys() == {"trainer.project_name"}  # it holds what `date` prints
    assert "rollout.vllm.tensor_parallel_size" in found.listing() and found.fill_in == ("rewards",)


ACTOR = "actor_rollout_ref.actor"
AGENT, TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
# Keys of a small run of each, and the places that they set, or the key that asks for a decision.
VALUES: dict[str, list[tuple[str, dict[str, Any] | str]]] = {
    "trl": [
        ("{max_steps: 500, warmup_ratio: 0.03, save_steps: 0.05}", {"optimizer.warmup_steps": 15}),
        ("{max_steps: 500, save_steps: 0.05}", {"checkpoint.every": 25}),
        ("{max_steps: 33, warmup_ratio: 0.1}", {"optimizer.warmup_steps": 4}),
        ("{max_steps: 5, num_train_epochs: 3}", {"max_steps": 5}),
        ("{vllm_gpu_memory_utilization: 0.3}", {"rollout.vllm.gpu_memory_utilization": 0.3}),
        (
            "{scale_rewards: batch, multi_objective_aggregation: normalize_then_sum}",
            {"advantage.multi_objective_aggregation": "normalize_then_sum"},
        ),
        ("{loss_type: cispo, epsilon_high: 5.0}", {"loss.epsilon_high": 5.0}),
        (
            "{optim: paged_adamw_8bit, load_in_4bit: true, use_peft: true}",
            {"optimizer.kind": "adamw_8bit", "model.quantization": "nf4", "model.lora": {}},
        ),
        (
            "{activation_offloading: true, gradient_checkpointing: true}",
            {"model.gradient_checkpointing": "offload"},
        ),
        ("{loss_type: luspo, importance_sampling_level: sequence}", {"loss.epsilon_low": 0.2}),
        (
            "{tools: [my.tools.search,'tools.py:add'], max_tool_calling_iterations: 3}",
            # Three rounds of calls are four messages of the model.
            {"rollout.tools": ["my.tools:search", "tools.py:add"], "rollout.max_turns": 4},
        ),
        (
            "{environment_factory: {maze: games.Maze}, max_tool_calling_iterations: null}",
            {"rollout.environment": {"maze": "games:Maze"}, "rollout.max_turns": ...},
        ),
    ],
    "axolotl": [
        ("rl: gdpo", {"advantage.multi_objective_aggregation": "normalize_then_sum"}),
        (
            "adapter: qlora\nload_in_4bit: true\noptimizer: adamw_bnb_8bit\ngradient_checkpointing: unsloth",
            {"model.lora": {}, "model.quantization": "nf4", "optimizer.kind": "adamw_8bit"}
            | {"model.gradient_checkpointing": "offload"},
        ),
        ("test_datasets: [{path: t, split: test}]", {"evaluation.dataset.split": "test"}),
        ("datasets: [{path: a}, {path: b}]", {"dataset.source": "a"}),
        ("trl: {top_k: -1, max_grad_norm: 0}", {"rollout.top_k": 0, "optimizer.max_grad_norm": None}),
        ("lora_r: 4", {"model.lora.r": ...}),
        ("wandb_project: p", {"logging.wandb": True}),
        ("wandb_project: p\nuse_wandb: false", {"logging.wandb": False}),
        ("wandb_project: p\nwandb_mode: disabled", {"logging.wandb": False}),
    ],
    "nemo_rl": [
        ("loss_fn: {use_cispo: true, ratio_clip_min: 0.2}", "loss_fn.ratio_clip_min"),
        ("data: {default: {env_name: code}}", "data.default.env_name"),
        ("data: {train: {dataset_name: squad}}", "data.train.dataset_name"),
        ("data: {train: [{dataset_name: gsm8k}, {dataset_name: DeepScaler}]}", "data.train"),
        ("env: {math: {math_verify_impl: dapo_math_verify}}", "env.math.math_verify_impl"),
        ("grpo: {max_rollout_turns: 50}", "grpo.max_rollout_turns"),
        ("grpo: {reward_shaping: {enabled: true, overlong_buffer_length: 8}}", "grpo.reward_shaping.enabled"),
        ("data: {shuffle: false}", "data.shuffle"),
        ("data: {train: {split: '${some.where}'}}", "data.train.split"),
    ],
    "verl": [
        (f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10", {"loss.epsilon_high": 1.2}),
        (f"{ACTOR}.clip_ratio_low=0.1 {ACTOR}.clip_ratio_high=0.28", {"loss.epsilon_high": 0.28}),
        (f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null", {"loss.epsilon_low": 0.1}),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", {"loss.loss_type": "grpo", "loss.delta": 3.0}),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", {"loss.aggregation": "sequence_sum"}),
        (f"{ACTOR}.policy_loss.loss_mode=sapo", {"loss.loss_type": "sapo", "loss.aggregation": "token_mean"}),
        (
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=77",
            {"loss.loss_type": "dr_grpo", "loss.max_completion_length": 77},
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4",
            {"loss.loss_type": "gspo", "loss.epsilon_low": 3e-4, "loss.delta": ...},
        ),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", {"loss.loss_type": "gmpo", "loss.aggregation": ...}),
        (f"{ACTOR}.policy_loss.loss_mode=dppo_tv", {"loss.dppo_ratio_max": 3.0}),
        ("algorithm.use_kl_in_reward=True", {"loss.beta": 0.001, "loss.kl_estimator": "k1"}),
        (
            "algorithm.adv_estimator=rloo",
            {"advantage.baseline": "leave_one_out", "advantage.scale_rewards": "none"},
        ),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", {"advantage.scale_rewards": "whiten"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"advantage.scale_rewards": "none"}),
        ("data.truncation=left", {"dataset.overlong_prompts": "truncate"}),
        ("actor_rollout_ref.model.lora_rank=8", {"model.lora.r": 8, "model.lora.alpha": 16}),
        ("trainer.test_freq=-1", {"evaluation.every": 0}),
        ("actor_rollout_ref.rollout.top_k=-1", {"rollout.top_k": 0}),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator"),
        (f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low"),
        (f"{ACTOR}.loss_agg_mode=token-sum", f"{ACTOR}.loss_agg_mode"),
        (f"{ACTOR}.ppo_mini_batch_size=7", f"{ACTOR}.ppo_mini_batch_size"),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files"),
        ("data.shuffle=False", "data.shuffle"),
        (f"{TURNS}.function_tool_path=t.py", f"{TURNS}.function_tool_path"),
        (f"{AGENT}.default_agent_loop=mine", f"{AGENT}.default_agent_loop"),
        ("custom_reward_function.path=score.py", "custom_reward_function.path"),
        ("reward_model.enable=True", "reward_model.enable"),
        ("reward_model.reward_manager=dapo", "reward_model.reward_manager"),
        ("actor_rollout_ref.model.path=$UNKNOWN", "actor_rollout_ref.model.path"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n"),
        ("made.up=3", "made.up"),
    ],
}


def small_run(source: str, text: str) -> tuple[str, str]:
    """A small run of the source with these keys, and a name for its file."""
    if source == "verl":
        usual = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
        usual |= {"data.train_batch_size": 256, "trainer.total_training_steps": 9}
        given = " ".join(f"{key}={value}" for key, value in usual.items() if key not in text)
        return f"python -m verl.trainer.main_ppo {given} {text}", "run.sh"
    usual = {"trl": "num_generations: 8", "axolotl": "base_model: m", "nemo_rl": "policy: {model_name: a/b}"}
    usual["nemo_rl"] += "\nalgorithm.max_num_steps: 9"
    usual["axolotl"] += "" if "rl:" in text.split() else "\nrl: grpo"
    if text.startswith("{"):
        text = text[1:-1].replace(", ", "\n")
    return f"{usual[source]}\n{text}", "run.yaml"


@pytest.mark.parametrize(
    ("source", "text", "expected"), [(source, *row) for source, rows in VALUES.items() for row in rows]
)
def test_a_value_is_put_in_our_terms_or_asks_for_a_decision(source, text, expected, tmp_path):
    found = run(tmp_path, *small_run(source, text))
    if isinstance(expected, str):
        assert decisions(found).keys() - {f"{ACTOR}.policy_loss.loss_mode"} == {expected}
    else:
        assert {place: found.places.get(place, ...) for place in expected} == expected
        assert source == "axolotl" or not decisions(found)


def test_verls_turns_are_ours_once_tools_are_named(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "{model: {path: m}, dataset: {source: d}, rollout: {tools: ['t.py:add']},"
        " rewards: [{reward: length, options: {target: 3}}]}",
        encoding="utf-8",
    )
    for key, turns in {"max_assistant_turns": 3, "max_user_turns": 4}.items():  # a message answers the last
        assert load_config(tmp_path / "run.yaml", [f"{TURNS}.{key}=3"]).rollout.max_turns == turns
    asking = f"{TURNS}.enable=True {TURNS}.max_assistant_turns=3"
    found = run(tmp_path, f"algorithm.adv_estimator=grpo {asking}", "run.txt")
    assert "rollout.tools" in decisions(found)[f"{TURNS}.enable"]
    assert "rollout.max_turns = 3" in decisions(found)[f"{TURNS}.max_assistant_turns"]


def test_every_key_of_the_real_verl_is_known(tmp_path):
    from importlib.metadata import PackageNotFoundError, files

    try:
        generated = [file for file in files("verl") or () if file.name == "_generated_ppo_trainer.yaml"]
    except PackageNotFoundError:
        generated = []
    if not generated:
        pytest.skip("verl is not installed")
    found = run(tmp_path, generated[0].read_text(encoding="utf-8"))
    assert not [row.key for row in found.rows if "not a key" in row.reason]
    assert decisions(found).keys() == {
        "algorithm.adv_estimator",  # PPO's, by default
        "actor_rollout_ref.rollout.n",
        "data.image_key",
    }


TRL_COMMAND = """
accelerate launch --config_file zero3.yaml train.py \\
    --model_name_or_path org/small --dataset_name org/sums \\
    --reward_funcs think_format_reward accuracy_reward --num_generations 8 --max-steps=20 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" --log_completions
"""


@pytest.mark.parametrize(
    ("launched", "prompts"),
    [
        ("accelerate launch --num_processes 8", 16),
        ("torchrun --nproc_per_node=4 --nnodes 2 -m", 16),
        ("deepspeed --num_gpus 2", 4),
        ("python", 2),
        ("accelerate launch --config_file zero3.yaml", None),
        ("torchrun --nproc_per_node $GPUS", None),
    ],
)
def test_a_batch_is_of_all_processes_that_the_command_starts(launched: str, prompts: int | None, tmp_path):
    command = f"{launched} grpo.py --num_generations 4 --max_steps 9 --per_device_train_batch_size 8"
    found = run(tmp_path, command, "run.sh")
    assert found.places.get("prompts_per_step") == prompts
    assert ("per_device_train_batch_size" in found.open) == (prompts is None)


def test_a_game_of_nemo_rl_is_not_the_maths_that_its_file_inherits(tmp_path):
    game = "env: {sliding_puzzle_game: {cfg: {max_moves: 50}}, math: {math_verify_impl: hf_math_verify}}"
    found = run(tmp_path, NEMO_RUN.partition("env:")[0] + game)
    assert found.places["rewards"] == [{"reward": "FILL_IN"}] and found.places["dataset.source"] == "FILL_IN"
    asked = {"env.sliding_puzzle_game.cfg.max_moves", "rewards", "dataset.source"}
    assert asked <= {*found.open} and "rollout.environment" in found.listing()


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("trl", "max_steps: -1", {"epochs": 3.0}),
        ("trl", "num_train_epochs: 2", {"epochs": 2}),
        ("axolotl", "learning_rate: 1.0e-6", {"epochs": 1.0}),
        ("axolotl", "num_epochs: 4", {"epochs": 4}),
        ("nemo_rl", "grpo: {max_num_epochs: 2, max_num_steps: 1000000}", {"epochs": 2}),
        ("nemo_rl", "grpo: {max_num_epochs: 2, max_num_steps: 70}", {"max_steps": 70}),
        ("nemo_rl", "grpo: {seed: 1}", {"max_steps": "FILL_IN"}),
        ("verl", "trainer.total_epochs=3", {"epochs": 3}),
        ("verl", "data.seed=1", {"epochs": 30}),
    ],
)
def test_the_length_of_a_run_is_carried_over_in_steps_or_epochs_or_asked(source, text, expected, tmp_path):
    text, name = small_run(source, text)
    for given in (" trainer.total_training_steps=9", "\nalgorithm.max_num_steps: 9"):
        text = text.replace(given, "")
    found = run(tmp_path, text, name)
    assert {key: found.places[key] for key in ("max_steps", "epochs") if key in found.places} == expected


def test_a_trl_command_converts_like_the_file_of_its_flags(tmp_path):
    found = run(tmp_path, TRL_COMMAND, "run.sh")
    assert found.source == "TRL" and found.places["max_steps"] == 20
    assert found.places["model.lora.target_modules"] == ["q_proj", "v_proj"]
    assert [entry["reward"] for entry in found.places["rewards"]] == [
        "regex_format",
        "trl.rewards:accuracy_reward",
    ]
    without = run(tmp_path, TRL_COMMAND.replace("--use_peft", ""), "run.sh")
    assert not any(place.startswith("model.lora") for place in without.places)  # as in TRL


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.sh", "echo hello", "no command"),
        ("run.sh", "python train.py --seed 'open", "No closing quotation"),
        ("run.sh", "a --seed 1\nb --seed 2", "--seed is 1, then 2"),
        ("run.sh", "python -m x --algo.advantage.estimator group_norm", "OpenRLHF"),
        ("run.toml", "seed = 1", ".yaml"),
        ("run.yaml", "", "is empty"),
        ("run.yaml", "[1, 2]", "holds no mapping"),
        ("run.json", "{", "cannot be read"),
        ("run.yaml", "base_model: m\nrl: grpo\ntrl: 3", "trl = 3"),
        ("run.yaml", "base_model: m\nrl: grpo\ndatasets: [a]", "datasets = ['a']"),
        ("run.yaml", "base_model: m\nnum_epochs: 3", "given answers"),
        ("run.yaml", "model_name_or_path: m\npacking: true", "given answers (packing)"),
        ("run.yaml", "sft: {max_num_steps: 3}\npolicy: {model_name: m}", "given answers (sft)"),
        ("run.sh", "torchrun -m x model.partial_pretrain=m data.max_length=9", "given answers"),
        ("run.yaml", "model: {path: m}\ndataset: {source: d}", "grpo-fast train"),
    ],
)
def test_a_file_that_holds_no_foreign_run_is_an_error_that_says_why(name, text, words, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        convert_file(tmp_path / name)
    assert words in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("x=3\npython t.py a.b=$x", 3),
        ("x=3; y=${x}4\npython t.py a.b=$y", 34),
        ("python t.py a.b=${1:-vllm}", "vllm"),
        ("x=$((7 / 2 - 1))\npython t.py a.b=$x", 2),
        ("if true; then x=1; else x=2; fi\npython t.py a.b=$x", "${x}"),  # which way the script takes is open
        ("python t.py a.b=$UNSET", "${UNSET}"),
        ("x=$x:more\npython t.py a.b=$x", "${x}"),
        ("x=$((2 ** 9999999))\npython t.py a.b=ok", "ok"),
        ("python t.py a.b=1 a.b=2", 2),  # one command: the last one counts
        ("ARGS=(\n a.b='[1, 2]'\n)\npython t.py ${ARGS[@]} --seed 1", [1, 2]),
        ("python t.py a.b='{not: [yaml'", "{not: [yaml"),
    ],
)
def test_a_scripts_variables_are_filled_in_where_they_are_known(script, value):
    def parse(text: str) -> object:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text

    assert read_command(script, parse) == {"a.b": value}


def test_a_converted_file_prints_its_configuration_but_does_not_run_before_it_is_filled_in(tmp_path, capsys):
    (tmp_path / "foreign.yaml").write_text("num_generations: 8", encoding="utf-8")
    converted = str(tmp_path / "run.yaml")
    assert cli.main(["convert", str(tmp_path / "foreign.yaml"), "-o", converted]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("not the same experiment before these are decided: model.path, dataset.source")
    assert "# To fill in: model.path" in (tmp_path / "run.yaml").read_text(encoding="utf-8")
    assert cli.main(["train", converted, "--print-config"]) == 0
    capsys.readouterr()
    assert cli.main(["train", converted]) == cli.main(["preview", converted]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("model.path", "dataset.source", "rewards"))
    assert cli.main(["convert", str(tmp_path / "foreign.yaml"), "-o", str(tmp_path / "no" / "run.yaml")]) == 2
