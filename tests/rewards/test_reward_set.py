import asyncio
import logging
import math
import threading

import numpy as np
import pytest
import torch

from grpo_fast.config.rewards import RewardConfig
from grpo_fast.data import Prompt
from grpo_fast.rewards import Reward, RewardError, RewardSet, load_rewards
from grpo_fast.rollout import Completion, Episode

PROMPTS = ["one?", "two?", "three?"]
COMPLETIONS = ["1", "22", "333"]


def score(*rewards, prompts=PROMPTS, completions=COMPLETIONS, columns=None):
    return score_with(RewardSet(rewards), prompts, completions, columns)


def score_with(rewards, prompts=PROMPTS, completions=COMPLETIONS, columns=None):
    """One completion of each prompt, whose token is its index."""
    columns = columns or {}
    rows = [
        Prompt(i, prompt, (0,), {name: values[i] for name, values in columns.items()})
        for i, prompt in enumerate(prompts)
    ]
    groups = [[Completion((i,), (0.0,), text, False)] for i, text in enumerate(completions)]
    return rewards.score_completions(rows, groups)


def lengths(completions):
    return [len(text) for text in completions]


def constant(*values, name="constant", **settings):
    return Reward(name, lambda completions: list(values), **settings)


class TestTotals:
    def test_the_total_is_the_weighted_sum_of_what_applies(self):
        result = score(Reward("length", lengths, 0.5), constant(1, None, 1, weight=2.0))
        torch.testing.assert_close(
            result.table, torch.tensor([[1.0, 1], [2, math.nan], [3, 1]]), equal_nan=True
        )
        assert result.total.tolist() == [2.5, 1.0, 3.5]
        assert result.table.dtype == result.total.dtype == torch.float32

    def test_a_sample_that_nothing_applies_to_has_no_total_and_is_reported(self, caplog):
        with caplog.at_level(logging.WARNING):
            result = score(constant(1, None, 1, name="a"), constant(1, None, None, name="b"))
        assert result.total.isnan().tolist() == [False, True, False]
        assert "reward 'a, b' gave None for 1 of 3 completions" in caplog.text
        assert "prompt: 'two?'" in caplog.text
        with pytest.raises(RewardError, match=r"'a' gave None for 3 of 3"):
            score(constant(None, None, None, name="a"))

    @pytest.mark.parametrize(
        "values",
        [np.array([1, 2, 3]), torch.tensor([1.0, 2, 3]), (1, 2, 3), [True, np.float32(2), torch.tensor(3.0)]],
        ids=["array", "tensor", "tuple", "scalars"],
    )
    def test_whatever_holds_numbers_is_a_list_of_them(self, values):
        assert score(Reward("r", lambda completions: values)).total.tolist() == [1, 2, 3]


class TestArguments:
    def test_a_function_gets_what_its_signature_names_group_after_group(self):
        conversation = [{"role": "user", "content": "b"}]
        prompts = [
            Prompt(0, "a", (1,), {"answer": "1", "level": 2}),
            Prompt(1, conversation, (2,), {"extra": 5}),
        ]
        groups = [[Completion((7,), (0.0,), text, False) for text in ("1", "2")]] * 2
        seen = {}

        def reward(prompts, completions, answer, extra, unset=3, *, completion_ids, **columns):
            seen.update(columns | locals())
            return [0, 1, 2, 3]

        result = RewardSet([Reward("r", reward)]).score_completions(prompts, groups)

        assert result.total.tolist() == [0, 1, 2, 3]
        answered = [[{"role": "assistant", "content": text}] for text in ("1", "2")]
        expected = {
            **{"prompts": ["a", "a", conversation, conversation], "completions": ["1", "2", *answered]},
            **{"completion_ids": [[7]] * 4, "answer": ["1", "1", None, None], "unset": 3},
            **{"extra": [None, None, 5, 5], "level": [2, 2, None, None]},
        }
        assert expected.items() <= seen.items()

    def test_what_a_reward_does_to_its_arguments_reaches_nothing_else(self):
        def spoil(prompts, completions, completion_ids, array, nested, option):
            prompts[0][0]["content"] = "?"
            completions[0][0]["content"] = "?"
            completion_ids[0].append(9)
            array[0][0] = 9
            nested[0]["a"][0].clear()
            nested[1] = None
            option["seen"].append(1)
            return [1.0, 1.0]

        seen = []

        def watch(prompts, completions, completion_ids, array, nested, option):
            seen.append(repr((prompts, completions, completion_ids, array, nested, option)))
            return [1.0, 1.0]

        columns = {"array": np.zeros(2), "nested": {"a": [[1], 2]}}
        prompt = Prompt(0, [{"role": "user", "content": "b"}], (1,), columns)
        group = [Completion((7,), (0.0,), "1", False)] * 2
        option = {"option": {"seen": []}}
        before = Reward("before", watch, options=option)
        for rewards in ([before], [before, Reward("spoil", spoil, options=option)], [before]):
            RewardSet([*rewards, Reward("after", watch, options=option)]).score_completions([prompt], [group])

        assert len(seen) == 6 and len(set(seen)) == 1

    @pytest.mark.parametrize(
        ("function", "columns", "options"),
        [
            (lambda completions, labels: labels, {"answer": [4, 5, 6], "topic": "abc"}, {}),
            (lambda completions, labels: labels, {"answer": "abc", "labels": [4, 5, 6]}, {}),
            (lambda completions, context: context["topic"], {"topic": [4, 5, 6]}, {}),
            (lambda completions, target: [target, 5, 6], {"target": "abc"}, {"target": 4}),
        ],
        ids=["labels are the answers", "unless a column has the name", "context", "options win"],
    )
    def test_axolotls_arguments_and_options_find_their_values(self, function, columns, options):
        reward = Reward("axolotl", function, options=options)
        assert score(reward, columns=columns).total.tolist() == [4, 5, 6]

    def test_a_missing_column_is_named_before_anything_is_generated(self):
        with pytest.raises(RewardError, match=r"'anser'.*'answer'"):
            RewardSet([Reward("r", lambda completions, anser: [])]).check_columns(["question", "answer"])
        built_in = RewardConfig(reward="exact_match", options={"answer_column": "solution"})
        load_rewards([built_in]).check_columns(["solution"])
        with pytest.raises(RewardError, match=r"'exact_match'.*'solution' \(answer_column\)"):
            load_rewards([built_in]).check_columns(["answer"])


class TestFailures:
    @pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])  # which would end a thread
    def test_an_exception_names_the_reward_and_shows_the_first_sample(self, error):
        def broken(completions, answer):
            raise error("no")

        with pytest.raises(RewardError, match=f"'broken' raised {error.__name__}: no") as caught:
            score(Reward("broken", broken), columns={"answer": ["x", "y", "z"]})
        assert (caught.value.reward, caught.value.sample) == ("broken", None)
        assert "the batch has 3 completions, the first is\nsample 0:\n  prompt: 'one?'" in str(caught.value)
        assert isinstance(caught.value.__cause__, error)

    @pytest.mark.parametrize("kind", ["async def reward(", "class reward:\n  def __call__(self, "])
    def test_an_exception_names_the_innermost_line_of_the_users_own_file(self, tmp_path, kind):
        path = tmp_path / "mine.py"
        body = "def parsed(text):\n  return json.loads(text)[0]\n"
        path.write_text(
            f"import json\n{body}{kind}completions):\n    return [parsed(t + '{{') for t in completions]\n"
        )
        own = load_rewards([RewardConfig(reward=f"{path}:reward")])
        with pytest.raises(RewardError, match=rf"JSONDecodeError: .*, at {path}:3: return json\.loads"):
            score_with(own)

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_function_that_hangs_fails_after_its_timeout(self, is_async):
        release = threading.Event()

        async def later(completions):
            await asyncio.sleep(60)

        function = later if is_async else lambda completions: release.wait(60) and []
        with pytest.raises(RewardError, match=r"'slow' .* timeout of 0\.05 seconds; raise it in rewards"):
            score(Reward("slow", function, timeout=0.05))
        release.set()

    @pytest.mark.parametrize(
        ("returned", "sample"),
        [
            ([1, 2], None),
            (1.0, None),
            ("abc", None),
            ([1, "2", 3], 1),
            ([1, 2, math.nan], 2),
            ([math.inf, 2, 3], 0),
            ([10**400, 2, 3], 0),
        ],
        ids=str,
    )
    def test_a_wrong_result_is_an_error_that_names_its_sample(self, returned, sample):
        with pytest.raises(RewardError, match=r"'r'.*return") as caught:
            score(Reward("r", lambda completions: returned))
        assert caught.value.sample == sample
        assert f"completion: '{COMPLETIONS[sample or 0]}'" in str(caught.value)

    def test_a_failure_is_skipped_and_reported_where_so_configured(self, caplog):
        def broken(completions):
            raise ValueError("no")

        with caplog.at_level(logging.WARNING):
            result = score(Reward("broken", broken, on_error="skip"), constant(None, 2, None))
        assert result.skipped["broken"].startswith("raised ValueError: no, at ")
        assert result.table[:, 0].isnan().all()
        assert result.total.isnan().tolist() == [True, False, True]
        assert "'broken' raised ValueError" in caplog.text

    def test_a_function_that_still_hangs_is_not_started_again(self):
        release, starts = threading.Event(), []

        def slow(completions):
            starts.append(1)
            release.wait(60)
            return [0] * len(completions)

        rewards = RewardSet([Reward("slow", slow, timeout=0.05, on_error="skip"), Reward("length", lengths)])
        score_with(rewards)
        again = score_with(rewards)
        release.set()
        assert again.skipped == {"slow": "has not returned from an earlier call yet"}
        assert len(starts) == 1

    def test_an_evaluation_is_decided_by_the_first_reward_or_the_one_named(self):
        rewards = RewardSet([constant(1, name="a"), constant(1, name="b", written="mine:b")])
        assert [rewards.position(name) for name in (None, "b", "mine:b")] == [0, 1, 1]
        with pytest.raises(ValueError, match=r"evaluation\.reward = 'c'"):
            rewards.position("c")


class TestAsync:
    def test_async_functions_run_at_once_and_while_plain_ones_are_called(self):
        gates, started, called = {}, threading.Event(), threading.Event()

        async def meet(own, other, completions):
            started.set()
            gates.setdefault(own, asyncio.Event()).set()
            await asyncio.wait_for(gates.setdefault(other, asyncio.Event()).wait(), 300)
            return lengths(completions) if await asyncio.to_thread(called.wait, 300) else []

        async def first(completions):
            return await meet("first", "second", completions)

        class Second:  # an object with an async call
            async def __call__(self, completions):
                return await meet("second", "first", completions)

        plain = Reward("plain", lambda completions: [called.set() or started.wait(300)] * 3)
        assert score(plain, Reward("first", first), Reward("second", Second())).total.tolist() == [3, 5, 7]


class Game:
    def get_reward(self):
        raise AssertionError("the episode has asked")


class Derived(Game):
    pass


class Silent:
    pass


SAID = [{"role": "user", "content": "one? go!"}]
MESSAGES = ({"role": "assistant", "content": ""}, {"role": "tool", "name": "t", "content": "5"})


class TestEpisodes:
    def score(self, rewards, *environments):
        episodes = [
            Episode(SAID, (0,), (True,), MESSAGES, one, reward=float(i)) for i, one in enumerate(environments)
        ]
        groups = [[Completion((i,), (0.0,), "", False, episode)] for i, episode in enumerate(episodes)]
        return rewards.score_completions([Prompt(0, "one?", (0,), {})] * len(groups), groups)

    def test_a_function_gets_conversations_and_the_environments_that_played(self):
        def reward(prompts, completions, environments):
            assert prompts == [SAID] * 2 and completions == [list(MESSAGES)] * 2
            return [environments.index(one) for one in (game, silent)]

        game, silent = Game(), Silent()
        assert self.score(RewardSet([Reward("r", reward)]), game, silent).total.tolist() == [0, 1]
        RewardSet([Reward("r", reward)]).check_columns(["environments"])
        with pytest.raises(RewardError, match=r"asks for 'environments'.*set rollout\.environment"):
            RewardSet([Reward("r", reward)]).check_columns(["answer"])

    def test_environments_give_their_own_rewards_and_none_for_others(self):
        numeric = RewardConfig(reward="numeric_match", weight=0.5, options={"answer_column": "a"})
        rewards = load_rewards([numeric], [Game, Silent, Derived, type("Game", (Game,), {})])
        rewards.check_columns(["a"])
        assert rewards.names == ("numeric_match", "Game", "Derived", "Game_2")
        assert rewards.weights == (0.5, 1.0, 1.0, 1.0)

        table = self.score(load_rewards([], [Game, Silent, Derived]), Silent(), Game(), Derived()).table
        expected = torch.tensor([[math.nan, math.nan], [1.0, math.nan], [math.nan, 2.0]])
        torch.testing.assert_close(table, expected, equal_nan=True)

    def test_a_built_in_reads_what_the_assistant_said_last_and_no_tool(self):
        row = {"a": ["5"]}
        said = [*MESSAGES, {"role": "assistant", "content": "5"}]
        match = load_rewards([RewardConfig(reward="exact_match", options={"answer_column": "a"})])
        function = match.rewards[0].function
        assert [function([turns], **row) for turns in (said, list(MESSAGES))] == [[1.0], [0.0]]
