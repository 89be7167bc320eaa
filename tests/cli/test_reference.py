"""The reference of the configuration: in the terminal, as a page, and by other tools' names."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_fast import cli
from grpo_fast.config.keys import keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS = [name for name in keys() if not name.startswith("evaluation.dataset.")]


def printed(capsys, *arguments: str) -> str:
    assert cli.main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_the_page_is_what_the_command_prints_and_has_every_key(capsys):
    page = PAGE.read_text("utf-8")
    assert page == printed(capsys, "--markdown"), "grpo-fast config --markdown > docs/configuration.md"
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == KEYS


def test_the_terminal_shows_types_defaults_meanings_and_other_names(capsys):
    assert printed(capsys, "optimizer.eps").startswith("optimizer.eps: number ≥ 1e-20 = 1e-08\n")
    assert all(word in printed(capsys, "optimizer.eps") for word in ("second moment", "adam_epsilon"))


def test_the_page_of_metrics_is_what_the_command_prints(capsys):
    assert cli.main(["metrics", "--markdown"]) == 0
    page = PAGE.with_name("metrics.md").read_text("utf-8")
    assert page == capsys.readouterr().out, "grpo-fast metrics --markdown > docs/metrics.md"
    names = {"lr": "learning_rate: ", "reward/x/mean": "reward/NAME/mean: ", "tools": "tools/calls: "}
    for name, said in names.items():
        assert cli.main(["metrics", name]) == 0 and capsys.readouterr().out.startswith(said)
    assert cli.main(["metrics", "rewrad"]) == 2 and "is no metric" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("loss.epsilon_low", ["loss.epsilon_low"]),
        ("rewards.0.weight", ["rewards.weight"]),
        ("epsilon", ["loss.epsilon_low"]),
        ("--learning-rate", ["optimizer.learning_rate"]),
        ("num_train_epochs", ["epochs"]),
        ("epsilon_low", ["loss.epsilon_low", "preference.ranking.epsilon_low"]),
        ("lr", ["optimizer.learning_rate", "optimizer.schedule"]),
        ("kl", ["loss.beta", "alerts.kl"]),
        ("qlora", ["model.quantization"]),
        ("model.lora", [name for name in KEYS if f"{name}.".startswith("model.lora.")]),
    ],
)
def test_a_key_is_found_by_its_name_its_last_part_and_other_names(wanted, found, capsys):
    lines = [line for line in printed(capsys, wanted.removeprefix("--")).splitlines() if line[:1] != " "]
    assert [line.partition(":")[0] for line in lines] == found


def test_a_word_shows_the_keys_and_recipes_that_are_about_it(capsys):
    said = printed(capsys, "kl")
    assert all(key in said for key in ("loss.kl_estimator", "loss.kl_in_reward"))
    assert "chat_template" in printed(capsys, "enable_thinking") and "model.lora.r" in printed(capsys, "lora")
    assert "`grpo-fast train calculator`" in printed(capsys, "calculator")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("kl_estimater", "did you mean loss.kl_estimator"),
        ("batch_size", "set micro_batch_tokens, and prompts_per_step"),
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate"),
        ("remove_unused_columns", "tokenised once"),
        ("zzzzzzzz", "`grpo-fast config` lists all"),
    ],
)
def test_what_is_no_key_leaves_with_2_and_what_to_do(wanted, said, capsys):
    assert cli.main(["config", wanted]) == 2
    assert said in capsys.readouterr().err
