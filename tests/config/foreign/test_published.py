"""What people publish for the peers starts here, and means what it meant there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast import cli
from grpo_fast.config.convert import convert_file
from grpo_fast.config.foreign.conversion import Conversion
from grpo_fast.config.keys import ConfigError
from grpo_fast.config.load import load_config
from grpo_fast.config.rewards import RewardConfig
from grpo_fast.config.tree import flatten, value_at
from grpo_fast.rewards.loading import load_function


def run(tmp_path, text: str, name: str = "foreign.yaml") -> Conversion:
    """The conversion of a file, after its outcome has loaded."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    conversion, written = convert_file(tmp_path / name)
    if "max_steps" in conversion.fill_in:
        (tmp_path / "run.yaml").write_text(written, encoding="utf-8")
        with pytest.raises(ConfigError, match="max_steps = 'FILL_IN': is to be filled in"):
            load_config(tmp_path / "run.yaml")
        written = written.replace("max_steps: FILL_IN", "max_steps: 1000")
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
def test_a_published_run_means_what_it_meant_and_accounts_for_every_key(name, tmp_path):
    case = CASES["documents"][name]
    found = run(tmp_path, case["text"], case["file"])
    check(found, case)
    keys = [f"{row.key}." for row in found.rows]
    for leaf in (f"{leaf}." for leaf in flatten(yaml.safe_load(case["text"]))):
        assert any(key.startswith(leaf) or leaf.startswith(key) for key in keys), leaf


USUAL: dict[str, dict[str, Any]] = {
    "trl": {"num_generations": 8},
    "trl preference": {},
    "axolotl": {"base_model": "m", "rl": "grpo"},
    "nemo_rl": {"policy": {"model_name": "a/b"}, "algorithm.max_num_steps": 9},
}


@pytest.mark.parametrize(
    ("source", "case"), [(source, case) for source, cases in CASES["values"].items() for case in cases]
)
def test_a_value_is_put_in_our_terms_or_asks_for_a_decision(source, case, tmp_path):
    check(run(tmp_path, yaml.safe_dump(USUAL[source] | case["keys"])), case)


@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"])
def test_trls_rewards_by_name_score_like_trls_own(name, tmp_path):
    trl = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    theirs = getattr(trl, name)
    theirs = theirs(max_completion_len=1280, soft_punish_cache=256) if name.startswith("get_") else theirs
    config = RewardConfig(**run(tmp_path, f"num_generations: 8\nreward_funcs: {name}").places["rewards"][0])
    _, ours, _ = load_function(config.reward, config.options)
    texts = [r"<think>a</think>\boxed{4}", r"\boxed{5}", "4", "<think>a<think></think>", "\n<think></think>"]
    batch = {
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "solution": ["$4$"] * 5,
        "completion_ids": [[0] * n for n in (10, 1024, 1100, 2000, 1280)],
    }
    assert ours(**batch) == theirs(**batch)


def test_a_game_of_nemo_rl_is_not_the_maths_that_its_file_inherits(tmp_path):
    game = "env: {sliding_puzzle_game: {cfg: {max_moves: 50}}, math: {math_verify_impl: hf_math_verify}}"
    inherited = CASES["documents"]["a run of NeMo-RL on Megatron"]["text"]
    found = run(tmp_path, inherited.partition("env:")[0] + game)
    assert found.places["rewards"] == [{"reward": "FILL_IN"}] and found.places["dataset.source"] == "FILL_IN"
    asked = {"env.sliding_puzzle_game.cfg.max_moves", "rewards", "dataset.source"}
    assert asked <= {*found.open} and "rollout.environment" in found.listing()


@pytest.mark.parametrize("case", CASES["lengths"])
def test_the_length_of_a_run_is_carried_over_or_asked_for(case, tmp_path):
    usual = {key: value for key, value in USUAL[case["source"]].items() if key != "algorithm.max_num_steps"}
    found = run(tmp_path, yaml.safe_dump(usual | case["keys"])).places
    assert {key: found[key] for key in ("max_steps", "epochs") if key in found} == case["expected"]


@pytest.mark.parametrize("case", CASES["refused"])
def test_a_file_that_holds_no_foreign_run_is_refused(case, tmp_path):
    (tmp_path / case["name"]).write_text(case["text"], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        convert_file(tmp_path / case["name"])
    assert case["says"] in str(caught.value) and case["name"] in str(caught.value)


REWARDED: dict[str, Any] = {"model.path": "m", "dataset.source": "d.jsonl", "rewards": [{"reward": "length"}]}


@pytest.mark.parametrize("case", CASES["overrides"])
def test_overrides_fill_in_and_decide_what_a_foreign_file_leaves_open(case, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(case["text"], encoding="utf-8")
    found = load_config(tmp_path / "run.yaml", case["given"]).model_dump()
    assert {place: value_at(found, place) for place in case["expected"]} == case["expected"]
    shown = capsys.readouterr().err
    assert "renamed: " in shown and not any(words in shown for words in ("to fill in", "taken", "default"))
    load_config(tmp_path / "run.yaml", {**case["given"], "logging.verbose": True})
    assert ("written for a default" in capsys.readouterr().err) == ("custom_dpo" not in case["text"])


@pytest.mark.parametrize("case", CASES["open"])
def test_what_stays_open_or_is_wrong_is_listed_by_its_key(case, tmp_path):
    (tmp_path / "run.yaml").write_text(case["text"], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml", case["given"])
    found = {problem.name: str(problem) for problem in caught.value.problems}
    assert found.keys() == case["problems"].keys()
    assert all(words in found[key] for key, words in case["problems"].items()), found
    assert ("read as NeMo-RL's by data:" in str(caught.value)) == ("data:" in case["text"])


def test_flat_names_of_another_tool_in_our_file_are_warned_of(tmp_path, caplog):
    (tmp_path / "run.yaml").write_text("num_generations: 4\nwarmup_ratio: 0.5\nmax_steps: 4")
    assert load_config(tmp_path / "run.yaml", REWARDED | {"beta": 0.1}).optimizer.schedule == "constant"
    assert "read as a file of grpo-fast; num_generations: names of TRL" in caplog.text


def test_lora_without_its_switch_is_not_lora(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\nlora_r: 8\nmax_steps: 2")
    assert load_config(tmp_path / "run.yaml", REWARDED).model.lora is None
    assert "all weights are trained and there is no LoRA\n  lora_r = 8" in capsys.readouterr().err


RANKED = [
    {"prompt": f"w{i} w9", "group": [{"response": f"w{i + rank}", "rank": rank} for rank in (1, 2, 3)]}
    for i in range(2, 14)
]
FILES = CASES["trained"]


@pytest.mark.parametrize("tool", FILES)
def test_another_tools_file_trains_and_its_run_resumes(tool, toy, tmp_path, capsys):
    names = {"model": toy["model"]["path"], "rows": toy["dataset"]["source"]}
    names |= {name: str(tmp_path / f"{name}.json") for name in ("ranked", "held_out")}
    for name, rows in (("ranked", RANKED[:8]), ("held_out", RANKED[8:])):
        Path(names[name]).write_text(json.dumps(rows), encoding="utf-8")
    names["reward"] = toy["rewards"][0]["reward"]
    file, run_dir = tmp_path / "foreign.yaml", tmp_path / "run"
    file.write_text(FILES[tool]["text"].format(**names), encoding="utf-8")
    sets = [setting.format(**names) for setting in FILES[tool]["sets"]]
    sets += [f"output_dir={run_dir}", "model.device=cpu", "logging.tensorboard=false"]

    assert cli.main(["train", str(file), *sets]) == 0
    assert f"converted from {tool.replace('tutorial', 'NeMo-RL')}" in capsys.readouterr().err
    trained, meant = load_config(run_dir).model_dump(), load_config(file, sets).model_dump()
    sections = ("algorithm", "max_steps", "dataset", "rewards", "rollout", "preference", "evaluation")
    assert {key: trained[key] for key in sections} == {key: meant[key] for key in sections}

    sets = ["max_steps=3", *(setting for setting in sets if not setting.startswith("max_steps"))]
    assert cli.main(["train", str(file), *sets, "--resume", "latest"]) == 0
    last = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last)["step"] == 3


def test_a_converted_file_prints_but_does_not_run_before_it_is_filled_in(tmp_path, capsys):
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
