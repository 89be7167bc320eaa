"""The reference of the configuration: in the terminal, as a page, and by other tools' names."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_fast import cli
from grpo_fast.cli.reference import find, markdown
from grpo_fast.config.foreign import names_of_peers
from grpo_fast.config.foreign.names import MOVED
from grpo_fast.config.keys import keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS = [name for name in keys() if not name.startswith("evaluation.dataset.")]


def test_the_page_is_what_the_command_prints():
    assert PAGE.read_text("utf-8") == markdown(), "grpo-fast config --markdown > docs/configuration.md"


def test_the_page_has_a_row_for_every_key_that_is_no_section():
    rows = [line.split("`")[1] for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows))
    assert {name for name in KEYS if not any(other.startswith(f"{name}.") for other in KEYS)} <= set(rows)


def test_the_terminal_shows_types_defaults_meanings_and_other_tools_names(capsys):
    assert cli.main(["config", "optimizer.betas"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("optimizer.betas: list of 2, each number ≥ 0 and < 1 = [0.9, 0.95]\n")
    assert all(part in shown for part in ("two moments", "adam_beta1", "policy.optimizer.kwargs.betas"))
    assert cli.main(["config"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in listed if not line.startswith(" ")] == KEYS


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("loss.epsilon_low", ["loss.epsilon_low"]),
        ("rewards.0.weight", ["rewards.weight"]),
        ("epsilon", ["loss.epsilon_low"]),
        ("--learning-rate", ["optimizer.learning_rate"]),
        ("num_train_epochs", ["epochs"]),
        ("reference_policy_kl_penalty", ["loss.beta", "preference.loss.beta"]),
        ("epsilon_low", ["loss.epsilon_low", "preference.ranking.epsilon_low"]),
        ("model.lora", [name for name in KEYS if f"{name}.".startswith("model.lora.")]),
    ],
)
def test_a_key_is_found_by_its_name_its_last_part_and_other_tools_names(wanted, found):
    assert find(wanted) == found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate"),
        ("remove_unused_columns", "tokenised once"),
        ("zzzzzzzz", "`grpo-fast config` lists all"),
    ],
)
def test_what_is_no_key_leaves_with_2_and_what_to_do(wanted, said, capsys):
    assert cli.main(["config", wanted]) == 2
    assert said in capsys.readouterr().err


def test_every_foreign_name_of_a_table_is_beside_the_key_it_leads_to():
    peers = names_of_peers()
    assert set(peers) <= set(keys())
    for name, rule in MOVED.items():
        place = rule if isinstance(rule, str) else getattr(rule, "keywords", {}).get("to")
        assert place is None or name in peers[place]["TRL, Axolotl"]
