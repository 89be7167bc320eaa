"""Training scripts of TRL and Unsloth: read without running them into a run and its functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from grpo_fast.cli import main
from grpo_fast.config.convert import convert_file
from grpo_fast.config.foreign.conversion import Conversion
from grpo_fast.config.foreign.script import read_script
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.lookup import load_callable

CASES = yaml.safe_load(Path(__file__).with_name("scripts.yaml").read_text(encoding="utf-8"))


def read(tmp_path: Path, text: str) -> Conversion:
    (tmp_path / "train.py").write_text(text)
    return read_script(tmp_path / "train.py", str(tmp_path / "functions.py"))


def trainer(arguments: str = "", before: str = "") -> str:
    return f"from trl import GRPOConfig, GRPOTrainer\nimport os\n{before}\nGRPOTrainer('m', {arguments})\n"


def reasons(conversion: Conversion) -> dict[str, str]:
    return {row.key: row.reason for row in conversion.rows if row.outcome == "needs a decision"}


def test_a_trl_script_trains_as_a_run_with_its_functions(tmp_path, toy, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "w{2 + i} w3"}}\n' for i in range(12)))
    names = {"model": toy["model"]["path"], "rows": tmp_path / "rows.jsonl", "out": tmp_path}
    script, out = tmp_path / "train.py", tmp_path / "run.yaml"
    script.write_text(CASES["trl"].format(**names))

    assert main(["convert", str(script), "-o", str(out)]) == 0
    shown, run = capsys.readouterr().err, yaml.safe_load(out.read_text())

    kept = (tmp_path / "run_functions.py").read_text()
    assert [entry["weight"] for entry in run["rewards"]] == [1.0, 0.5, 0.25]
    assert run["model"]["lora"] == {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert (run["dataset"]["rename"], run["dataset"]["size"]) == ({"question": "prompt"}, 8)
    assert "grpo-fast export" in shown and "  # in order" in kept and "\nimport re\n" in kept
    for left in ("unused", "string", "torch", "OPENAI", "from_pretrained", "GRPO", "not of the reward"):
        assert left not in kept
    assert main(["train", str(out), "model.device=cpu", "model.gradient_checkpointing=false"]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward/scaled/mean"] == metrics[-1]["reward/count_reward/mean"] / 2

    (tmp_path / "run_functions.py").write_text("mine = 1\n")
    assert main(["convert", str(script), "-o", str(out)]) == 2
    assert (tmp_path / "run_functions.py").read_text() == "mine = 1\n"


def test_an_unsloth_notebook_gives_its_settings_rewards_and_rows(tmp_path):
    cells = ["%%capture\nif True:\n    !pip install unsloth\n", "%%bash\nls (\n", CASES["unsloth"]]
    document = {"cells": [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells]}
    (tmp_path / "nb.ipynb").write_text(json.dumps(document))
    functions = tmp_path / "f.py"

    found = read_script(tmp_path / "nb.ipynb", str(functions))
    functions.write_text(found.files[str(functions)])

    expected = {
        **{"model.path": "org/model", "model.quantization": "nf4", "model.dtype": "bfloat16"},
        **{"model.gradient_checkpointing": "offload", "model.lora.alpha": 64, "model.lora.r": 32},
        **{"rollout.max_completion_length": 768, "rollout.top_k": 0, "rollout.min_p": 0.1},
        **{"prompts_per_step": 1, "max_steps": 250, "dataset.split": "train", "dataset.name": "main"},
        **{"dataset.source": "openai/gsm8k", "dataset.transform": f"{functions}:make_row"},
    }
    assert {place: found.given.get(place) for place in expected} == expected
    rewards = [entry["reward"].partition(":")[2] for entry in found.given["rewards"]]
    assert rewards == ["close", "long", "reward_3"]
    assert found.open == () and "hf_0123456789abcdefghij" not in found.listing() + str(found.files)
    assert "tokenizer = AutoTokenizer.from_pretrained('org/model')" in functions.read_text()
    functions.write_text(functions.read_text().replace("AutoTokenizer.from_pretrained", "str"))
    make_row = load_callable(f"{functions}:make_row", "dataset.transform")
    row = make_row({"question": "1+1?", "answer": "#### 2"})
    assert [turn["content"] for turn in row["prompt"]] == ["End with\n    ####", "1+1?"]
    assert row["answer"] == "2"


@pytest.mark.parametrize("case", CASES["values"])
def test_values_are_resolved_by_the_text_alone(tmp_path, case):
    found = read(tmp_path, trainer(case["arguments"], case.get("before", "")))
    assert {place: found.places.get(place) for place in case["expected"]} == case["expected"]


@pytest.mark.parametrize("case", CASES["decisions"])
def test_what_cannot_be_read_is_left_to_decide(tmp_path, case):
    found = read(tmp_path, trainer(case["arguments"], case.get("before", "")))
    assert case["reason"] in reasons(found)[case["key"]], reasons(found)


def test_a_reward_that_a_condition_decides_is_kept_with_the_condition(tmp_path):
    both = "def a(completions): pass\ndef b(completions): pass\nif os.environ:\n    r = a\nelse:\n    r = b"
    found = read(tmp_path, trainer("[r]", both))
    assert found.given["rewards"][0]["reward"].endswith("functions.py:r")
    assert "\nif os.environ:\n    r = a\nelse:\n    r = b\n" in found.files[str(tmp_path / "functions.py")]


def test_a_name_of_a_reward_is_the_modules_and_not_another_functions(tmp_path):
    before = "s = 'x'\ndef r(completions): return s\ndef a():\n    s = 'y'\n    return GRPOConfig(s)"
    found = read(tmp_path, trainer("r, args=a()", before))
    assert found.given["output_dir"] == "y"
    assert "'y'" not in found.files[str(tmp_path / "functions.py")]


def test_a_pair_of_settings_that_is_refused_here_leaves_one_to_decide(tmp_path):
    (tmp_path / "train.py").write_text(trainer("args=GRPOConfig('o', use_vllm=True, top_k=10)"))
    found = convert_file(tmp_path / "train.py", output=tmp_path / "run.yaml")[0]
    assert found.given["rollout.top_k"] == 10 and "loss.sampler_correction" not in found.given
    assert "would bias" in reasons(found)["vllm_importance_sampling_correction"]


def test_other_trainers_of_a_script_are_listed(tmp_path):
    text = "from trl import *\nMine = 1\nGRPOTrainer('a')\nGRPOTrainer('b')\n"
    found = read(tmp_path, text)
    assert found.given["model.path"] == "a" and reasons(found).keys() >= {"GRPOTrainer (line 4)"}
    pairs = read(tmp_path, "from trl import *\nDPOTrainer('a', args=DPOConfig('o', beta=0.3))\n")
    assert pairs.given["algorithm"] == "dpo" and pairs.given["preference.loss.beta"] == 0.3


MANY = "".join(f"a{i} = [{', '.join([f'a{i + 1}'] * 9)}]\n" for i in range(40)[::-1])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print(1)", "calls no GRPOTrainer or DPOTrainer"),
        ("from trl import *\nSFTTrainer('m')", "but SFTTrainer, which is not converted"),
        ("x = 1\ny = = 2", "line 2: invalid syntax"),
        (f"x = [{'1,' * 600_000}]", "move its data to a file"),
        (f"x = {'-' * 100_000}1", "cannot be parsed"),
        (f"x = {'-' * 900}1", "nested too deeply"),
        (f"x = {'+'.join(['1'] * 2000)}", "nested too deeply"),
        (MANY, "has too many parts"),
    ],
)
def test_a_text_that_is_no_such_script_is_refused(tmp_path, text, problem):
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        convert_file(tmp_path / "train.py", output=tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="takes -o OUT"):
        convert_file(tmp_path / "train.py")


@pytest.mark.parametrize(
    "value", ["__import__('os').system('touch PWNED')", "9 ** 9 ** 9 ** 9", "'x' * 10 ** 12", "b0"]
)
def test_nothing_of_a_script_runs_and_reading_it_ends(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    before = "import os\nos.system('touch PWNED')\nexec(\"open('PWNED', 'w')\")\n"
    before += "def b0(): return b1()\ndef b1(): return b0()\ndef c0(): return c0()\n"
    before += "@os.system('touch PWNED')\ndef r(completions, x=open('PWNED', 'w')): return c0()\n"
    found = read(tmp_path, trainer(f"r, args=GRPOConfig(beta={value}, seed=c0())", before))
    assert {"beta", "seed"} <= reasons(found).keys() and not Path("PWNED").exists()
