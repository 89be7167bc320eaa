import re

import pytest

from grpo_fast.config.rewards import RewardConfig
from grpo_fast.data import Prompt
from grpo_fast.rewards import load_rewards
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

class Silent:
    pass

ends_in_b = Ends("b")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a file of rewards and a broken one."""
    (tmp_path / "my_rewards.py").write_text(USER_FILE)
    (tmp_path / "broken.py").write_text("import no_such_package")
    (tmp_path / "raises.py").write_text("import json\nKEY = json.loads('{')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(reward, **options):
    return load_rewards([RewardConfig(reward=reward, options=options)])


def total(rewards, *completions):
    group = [Completion((0,), (0.0,), text, False) for text in completions]
    return rewards.score_completions([Prompt(0, "?", (0,), {})], [group]).total.tolist()


@pytest.mark.parametrize(
    ("reward", "options", "completions", "name", "values"),
    [
        ("my_rewards.py:shout", {"factor": 2.0}, ["HEY", "hey"], "shout", [2, 0]),
        ("my_rewards.py:Ends", {"letter": "y"}, ["hey", "ho"], "Ends", [1, 0]),
        ("my_rewards.py:ends_in_b", {}, ["ab", "ba"], "Ends", [1, 0]),
        ("my_rewards:shout", {}, ["HEY", "hey"], "shout", [1, 0]),
    ],
    ids=["function with options", "class made with options", "object with a call", "module"],
)
def test_a_file_or_a_module_holds_rewards(folder, monkeypatch, reward, options, completions, name, values):
    monkeypatch.syspath_prepend(folder)
    rewards = load(reward, **options)
    assert rewards.names == (name,)
    assert total(rewards, *completions) == values


def test_settings_are_taken_over_and_a_name_that_occurs_again_is_numbered():
    settings = {"weight": 0.5, "timeout": 3.0, "on_error": "skip", "per_group": True}
    patterns = [{"reward": "regex_format", "options": {"pattern": p}} for p in ("a", "b", "c")]
    rewards = load_rewards(
        [RewardConfig(**patterns[0], **settings), *map(RewardConfig.model_validate, patterns)]
    )
    assert rewards.names == ("regex_format", "regex_format_2", "regex_format_3", "regex_format_4")
    assert {key: getattr(rewards.rewards[0], key) for key in settings} == settings


@pytest.mark.parametrize(
    ("reward", "options", "named"),
    [
        ("exact_mach", {}, "'exact_match'"),
        ("no_such_module:reward", {}, "path/to/file.py:function"),
        ("broken.py:reward", {}, "ModuleNotFoundError"),
        ("raises.py:reward", {}, "raises.py:2: KEY = json.loads('{')"),
        ("my_rewards.py:shot", {}, "'shout'"),
        ("my_rewards.py", {}, "write my_rewards.py:NAME: there are Ends"),
        ("my_rewards.py:shout", {"factr": 1}, "'factor'"),
        ("my_rewards.py:Ends", {"lettr": 1}, "'letter'"),
        ("my_rewards.py:Silent", {}, "__call__"),
        ("numeric_match", {"tolerance": -1}, "'numeric_match': tolerance"),
        ("regex_format", {"pattern": "("}, "regular expression"),
        ("exact_match", {"extract": "Answer: .*"}, "one group"),
        ("soft_overlong", {"max_length": 1, "cache": 3}, "cache = 3"),
    ],
)
def test_what_cannot_be_loaded_is_refused(folder, reward, options, named):
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        load(reward, **options)
    assert reward.partition(":")[0] in str(caught.value)
