import os
import signal
import sys

import pytest

from grpo_fast.rewards.builtins import math_equivalence
from grpo_fast.rewards.builtins.math_equivalence import MathVerify, Worker


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
    ],
)
def test_equivalent_expressions_are_right(completion, answer, value):
    assert MathVerify(time_limit=60)([completion], answer=[answer]) == [value]


@pytest.mark.skipif(sys.platform == "win32", reason="stops the process with a signal")
def test_a_comparison_that_hangs_is_killed_and_the_next_one_works():
    worker = Worker()
    worker.ask(["2", "2"], 60.0)
    first = worker._process
    os.kill(first.pid, signal.SIGSTOP)

    hung = worker.ask(["2", "2"], 0.05)
    after = worker.ask(["2", "2"], 60.0)
    worker.stop()
    assert (hung, after) == (False, True)
    assert first.returncode == -signal.SIGKILL


def test_a_process_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(math_equivalence, "SCRIPT", script)
    with pytest.raises(RuntimeError, match="the process for math_verify does not start"):
        Worker().ask(["2", "2"], 5.0)


def test_a_process_that_dies_of_a_question_answers_no(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("print('ready', flush=True); input()")
    monkeypatch.setattr(math_equivalence, "SCRIPT", script)
    assert Worker().ask(["2", "2"], 60.0) is False
