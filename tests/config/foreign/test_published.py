"""What people publish for the peers starts here, and means what it meant there."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast import cli
from grpo_fast.config.foreign import Conversion
from grpo_fast.config.foreign.command import read_command
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.load import convert_file, load_config
from grpo_fast.config.rewards import RewardConfig
from grpo_fast.config.tree import flatten
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


CASES = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


def check(found: Conversion, case: dict[str, Any]) -> None:
    """That a conversion is what `published.yaml` says."""
    expected, asks = case.get("places", {}), case.get("asks", {})
    assert {place: found.places.get(place, "(unset)") for place in expected} == expected
    asked, words = decisions(found), asks if isinstance(asks, dict) else {key: [] for key in asks}
    assert asked.keys() == words.keys() == {*found.open} - {*found.fill_in}
    assert all(word in asked[key] for key in words for word in words[key]), asked
    assert all(word in found.listing() + "\n" for word in case.get("says", ()))


@pytest.mark.parametrize("name", CASES["documents"])
def test_a_published_run_means_what_it_meant_and_every_key_is_in_its_account(name, tmp_path):
    case = CASES["documents"][name]
    found = run(tmp_path, case["text"], case["file"])
    check(found, case)
    if case["file"].endswith(".yaml"):
        keys = [f"{row.key}." for row in found.rows]
        for leaf in (f"{leaf}." for leaf in flatten(yaml.safe_load(case["text"]))):
            assert any(key.startswith(leaf) or leaf.startswith(key) for key in keys), leaf


USUAL = {
    "trl": {"num_generations": 8},
    "axolotl": {"base_model": "m", "rl": "grpo"},
    "nemo_rl": {"policy": {"model_name": "a/b"}, "algorithm.max_num_steps": 9},
    "verl": {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "data.train_batch_size": 256,
    }
    | {"trainer.total_training_steps": 9},
}


def small_run(source: str, keys: dict[str, Any] | str, *leave_out: str) -> tuple[str, str]:
    """A small run of the source with these keys, and a name for its file."""
    usual = {key: value for key, value in USUAL[source].items() if key not in leave_out}
    if isinstance(keys, dict):
        return yaml.safe_dump(usual | keys), "run.yaml"
    given = " ".join(f"{key}={value}" for key, value in usual.items() if key not in keys)
    return f"python -m verl.trainer.main_ppo {given} {keys}", "run.sh"


@pytest.mark.parametrize(
    ("source", "case"), [(source, case) for source, cases in CASES["values"].items() for case in cases]
)
def test_a_value_is_put_in_our_terms_or_asks_for_a_decision(source, case, tmp_path):
    check(run(tmp_path, *small_run(source, case["keys"])), case)


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


TURNS = "actor_rollout_ref.rollout.multi_turn"


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
    inherited = CASES["documents"]["a run of NeMo-RL on Megatron"]["text"]
    found = run(tmp_path, inherited.partition("env:")[0] + game)
    assert found.places["rewards"] == [{"reward": "FILL_IN"}] and found.places["dataset.source"] == "FILL_IN"
    asked = {"env.sliding_puzzle_game.cfg.max_moves", "rewards", "dataset.source"}
    assert asked <= {*found.open} and "rollout.environment" in found.listing()


@pytest.mark.parametrize(
    ("source", "keys", "expected"),
    [
        ("trl", {"max_steps": -1}, {"epochs": 3.0}),
        ("trl", {"num_train_epochs": 2}, {"epochs": 2}),
        ("axolotl", {"learning_rate": 1e-6}, {"epochs": 1.0}),
        ("axolotl", {"num_epochs": 4}, {"epochs": 4}),
        ("nemo_rl", {"grpo": {"max_num_epochs": 2, "max_num_steps": 1000000}}, {"epochs": 2}),
        ("nemo_rl", {"grpo": {"max_num_epochs": 2, "max_num_steps": 70}}, {"max_steps": 70}),
        ("nemo_rl", {"grpo": {"seed": 1}}, {"max_steps": "FILL_IN"}),
        ("verl", "trainer.total_epochs=3", {"epochs": 3}),
        ("verl", "data.seed=1", {"epochs": 30}),
    ],
)
def test_the_length_of_a_run_is_carried_over_in_steps_or_epochs_or_asked(source, keys, expected, tmp_path):
    found = run(tmp_path, *small_run(source, keys, "trainer.total_training_steps", "algorithm.max_num_steps"))
    assert {key: found.places[key] for key in ("max_steps", "epochs") if key in found.places} == expected


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
