import re

import pytest

from grpo_fast.rewards import load_rewards
from grpo_fast.rewards.config import RewardConfig

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
    return rewards.score(["?"] * len(completions), completions, {}).total.tolist()


def test_a_function_of_a_file_gets_its_options(user_file):
    rewards = load(f"{user_file}:shout", factor=2.0)
    assert rewards.names == ("shout",)
    assert total(rewards, "HEY", "hey") == [2, 0]


def test_a_class_of_a_file_is_made_with_its_options(user_file):
    rewards = load(f"{user_file}:Ends", letter="y")
    assert rewards.names == ("Ends",)
    assert total(rewards, "hey", "ho") == [1, 0]


def test_an_object_with_a_call_is_a_reward(user_file):
    rewards = load(f"{user_file}:ends_in_b")
    assert rewards.names == ("Ends",)
    assert total(rewards, "ab", "ba") == [1, 0]


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
        ("exact_mach", {}, "there is no built-in reward 'exact_mach'"),
        ("exact_mach", {}, "did you mean 'exact_match'?"),
        (
            "rewards.accuracy",
            {},
            "a function of your own is written rewards:accuracy or path/to/file.py:accuracy",
        ),
        ("no_such_module:reward", {}, "A file that is not installed is given by its path"),
        ("no/file.py:reward", {}, "there is no file 'no/file.py'"),
        (
            "numeric_match",
            {"toleranc": 1},
            "no option 'toleranc': there are answer_column, marker, tolerance; did",
        ),
        ("numeric_match", {"tolerance": -1}, "options of reward 'numeric_match': tolerance: Input should be"),
        ("regex_format", {}, "pattern: Field required"),
        ("regex_format", {"pattern": "("}, "'(' is no regular expression"),
        ("exact_match", {"extract": "Answer: .*"}, "needs exactly one group"),
        ("soft_overlong", {"max_length": 1, "cache": 3}, "cache = 3 exceeds max_length = 1"),
        ("tag_format", {"tags": "think"}, "tags: Input should be a valid list"),
    ],
)
def test_what_cannot_be_loaded_is_refused(reward, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(reward, **options)


@pytest.mark.parametrize(
    ("attribute", "options", "message"),
    [
        ("shot", {}, "has no 'shot'"),
        ("shot", {}, "did you mean 'shout'?"),
        ("number", {}, "is int, which cannot be called"),
        ("shout", {"factr": 1}, "no option 'factr'"),
        ("Ends", {"lettr": 1}, "no option 'lettr': there are letter; did you mean 'letter'?"),
    ],
)
def test_what_a_file_does_not_have_is_refused(user_file, attribute, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(f"{user_file}:{attribute}", **options)


def test_a_file_that_fails_to_load_says_why(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package")
    with pytest.raises(ValueError, match=r"cannot load '.*broken\.py': ModuleNotFoundError"):
        load(f"{path}:reward")
