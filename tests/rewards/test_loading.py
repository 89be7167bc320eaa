import re

import pytest

from grpo_fast.data import Prompt
from grpo_fast.rewards import load_rewards
from grpo_fast.rewards.config import RewardConfig
from grpo_fast.rollout import Completion

USER_FILE = """
from dataclasses import dataclass

def shout(completions, factor=1.0):
    return [factor * text.isupper() for text in completions]

@dataclass
class Ends:
    letter: str = "a"

    def __call__(self, completions, **columns):
        return [float(text.endswith(self.letter)) for text in completions]

ends_in_b = Ends("b")
number = 3
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_FILE)
    return path


def load(reward, **options):
    return load_rewards([RewardConfig(reward=reward, options=options)])


def total(rewards, *completions):
    group = [Completion((0,), (0.0,), text, False) for text in completions]
    return rewards.score_completions([Prompt(0, "?", (0,), {})], [group]).total.tolist()


@pytest.mark.parametrize(
    ("attribute", "options", "completions", "name", "values"),
    [
        ("shout", {"factor": 2.0}, ["HEY", "hey"], "shout", [2, 0]),
        ("Ends", {"letter": "y"}, ["hey", "ho"], "Ends", [1, 0]),
        ("ends_in_b", {}, ["ab", "ba"], "Ends", [1, 0]),
    ],
    ids=["function with options", "class made with options", "object with a call"],
)
def test_a_file_holds_rewards(user_file, attribute, options, completions, name, values):
    rewards = load(f"{user_file}:{attribute}", **options)
    assert rewards.names == (name,)
    assert total(rewards, *completions) == values


def test_a_function_of_a_module_is_imported(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
    assert total(load("my_rewards:shout"), "HEY") == [1]


def test_weights_timeouts_and_error_policies_are_taken_over():
    config = RewardConfig(reward="exact_match", weight=0.5, timeout=3.0, on_error="skip")
    reward = load_rewards([config]).rewards[0]
    assert (reward.weight, reward.timeout, reward.on_error) == (0.5, 3.0, "skip")


def test_a_name_that_occurs_again_is_numbered():
    configs = [RewardConfig(reward="regex_format", options={"pattern": p}) for p in ("a", "b", "c")]
    assert load_rewards(configs).names == ("regex_format", "regex_format_2", "regex_format_3")


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        ("exact_mach", {}, "'exact_match'"),
        ("rewards.accuracy", {}, "rewards:accuracy"),
        ("no_such_module:reward", {}, "path/to/file.py:reward"),
        ("no/file.py:reward", {}, "'no/file.py'"),
        ("numeric_match", {"toleranc": 1}, "'tolerance'"),
        ("numeric_match", {"tolerance": -1}, "'numeric_match': tolerance"),
        ("regex_format", {}, "pattern"),
        ("regex_format", {"pattern": "("}, "regular expression"),
        ("exact_match", {"extract": "Answer: .*"}, "one group"),
        ("soft_overlong", {"max_length": 1, "cache": 3}, "cache = 3"),
        ("tag_format", {"tags": "think"}, "tags"),
    ],
)
def test_what_cannot_be_loaded_is_refused(reward, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(reward, **options)


@pytest.mark.parametrize(
    ("attribute", "options", "message"),
    [
        ("shot", {}, "'shout'"),
        ("number", {}, "is int"),
        ("shout", {"factr": 1}, "'factor'"),
        ("Ends", {"lettr": 1}, "'letter'"),
    ],
)
def test_what_a_file_does_not_have_is_refused(user_file, attribute, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(f"{user_file}:{attribute}", **options)


def test_a_file_that_fails_to_load_says_why(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package")
    with pytest.raises(ValueError, match=r"broken\.py.*ModuleNotFoundError"):
        load(f"{path}:reward")
