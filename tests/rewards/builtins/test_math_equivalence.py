import asyncio
import os
import signal
import sys
from decimal import Decimal

import pytest

from grpo_fast.config.rewards import RewardConfig
from grpo_fast.data import Prompt
from grpo_fast.loop.collect import generate
from grpo_fast.rewards import RewardError, load_rewards
from grpo_fast.rewards.builtins import math_equivalence
from grpo_fast.rewards.builtins.math_equivalence import MathVerify, Pool
from grpo_fast.rewards.calls import event_loop
from grpo_fast.rollout import Completion, Sampling

HOPELESS = (r"\boxed{9^{9^{9^9}}}", r"\boxed{7^{7^{7^{7}}}}")


def run(work):
    return asyncio.run_coroutine_threadsafe(work, event_loop("math_verify")).result()


@pytest.fixture
def pool():
    pool = Pool(1)
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so it is \boxed{\frac{2}{6}}", r"\frac{1}{3}", 1.0),
        (r"so it is \boxed{0.5}", r"$\frac{1}{3}$", 0.0),
        ("The answer is $(x+1)^2$", "x^2 + 2x + 1", 1.0),
        ("The answer is 72.", "He sold 48.\n#### 72", 1.0),
        ("The answer is 72.", 72, 1.0),
        ("no idea", "72", 0.0),
        (r"\boxed{\$32,\!348}", r"\$32,\!348", 1.0),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        ("72", None, None),
        ("72", " ", None),
        (r"\boxed{\frac{1}{", "72", 0.0),
        (f"The answer is 72.{' ' * 200_000}", "72", 1.0),
    ],
)
def test_equivalent_expressions_are_right(completion, answer, value):
    assert run(MathVerify(time_limit=60)([completion], answer=[answer])) == [value]


def test_late_answers_are_wrong_and_the_rest_of_the_batch_is_scored():
    rewards = load_rewards([RewardConfig(reward="math_verify")])
    prompts = [Prompt(i, f"question {i}", (1, 2), {"answer": str(i)}) for i in range(3)]
    texts = [[HOPELESS[0], r"\boxed{0}"], [r"\boxed{1}", "no idea"], [r"\boxed{2}", HOPELESS[1]]]
    completions = [[Completion((5,), (-1.0,), text, False) for text in group] for group in texts]

    class Engine:
        def generate(self, prompts, n, sampling, *, observer):
            for index in (1, 0, 2):
                observer.group_done(index, completions[index])
            return completions

    _, early = generate(Engine(), prompts, 2, Sampling(4), rewards)
    known = early.values()
    assert list(known) == ["math_verify"]
    found = rewards.score_completions(prompts, completions, precomputed=known)
    assert found.total.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert found.log.metrics == {"math_verify/timeouts": [0.5, 0.0, 0.5]}


@pytest.mark.skipif(sys.platform == "win32", reason="stops the process with a signal")
def test_a_comparison_that_hangs_is_killed_and_the_next_one_works(pool):
    async def ask():
        await pool.ask(["2", "2"], 60.0)
        first = pool.workers[0]._process
        os.kill(first.pid, signal.SIGSTOP)
        return await pool.ask(["2", "2"], 0.05), await pool.ask(["2", "2"], 60.0), await first.wait()

    assert run(ask()) == ("timeout", True, -signal.SIGKILL)


def test_a_canceled_question_leaves_no_reply_to_the_next_one(pool):
    async def ask():
        await pool.ask(["2", "2"], 60.0)
        left = asyncio.create_task(pool.ask(["2", HOPELESS[0]], 60.0))
        await asyncio.sleep(0.2)
        left.cancel()
        return [await pool.ask(["2", text], 60.0) for text in "23"]

    assert run(ask()) == [True, False]


def test_a_process_that_does_not_start_is_an_error(pool, tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(math_equivalence, "SCRIPT", script)
    monkeypatch.setattr(math_equivalence, "POOL", pool)
    rewards = load_rewards([RewardConfig(reward="math_verify")])
    with pytest.raises(RewardError, match="the process for math_verify does not start"):
        rewards.score_completions(
            [Prompt(0, "q", (1,), {"answer": "2"})], [[Completion((5,), (-1.0,), "2", False)]]
        )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_worker_beyond_its_memory_answers_no_and_is_replaced(pool, tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    source = math_equivalence.SCRIPT.read_text()
    wanted = "        return bool(verify("
    assert source.count(wanted) == 1
    script.write_text(source.replace(wanted, f"        b'0' * (MEMORY_LIMIT * ('huge' in text))\n{wanted}"))
    monkeypatch.setattr(math_equivalence, "SCRIPT", script)
    assert [run(pool.ask(["2", text], 60.0)) for text in ("huge 2", "2")] == ["timeout", True]


def test_a_completion_is_compared_with_each_number_once_up_to_the_right_one(monkeypatch):
    asked = []

    class Pool:
        async def ask(self, question, time_limit):
            asked.append(question[0])
            return question[0] == question[1]

    monkeypatch.setattr(math_equivalence, "POOL", Pool())
    answers = [4.0, ["3", "2", "5"], Decimal("1.00"), None]
    assert run(MathVerify()(completions=["9", "2", "1", "1"], answer=answers)) == [0.0, 1.0, 1.0, None]
    assert sorted(asked) == ["1", "2", "3", "4"]
