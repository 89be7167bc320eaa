import pytest

from grpo_fast.data.sources import generate_rows
from grpo_fast.rewards.builtins.reasoning_gym import ReasoningGym, is_plain

pytest.importorskip("reasoning_gym")


def entry(task, **options):
    return generate_rows(task, seed=3, size=1, options=options)[0]["entry"]


def test_the_tasks_own_scorer_decides_on_the_part_that_is_the_answer():
    item = entry("chain_sum")
    right, wrong = item["answer"], str(int(item["answer"]) + 1)
    marked = [f"Answer: {wrong}\nAnswer: {right}", right, f"Answer: {right}"]
    assert ReasoningGym()([right, f"{right}.00", wrong], entry=[item] * 3) == [1.0, 1.0, 0.0]
    assert ReasoningGym(extract="Answer: (.*)")(marked, entry=[item] * 3) == [1.0, 0.0, 1.0]
    assert ReasoningGym()(["1"], entry=[None]) == [None]


def test_partial_credit_can_be_refused():
    item = entry("chain_sum")
    near = f"it is {item['answer']}"
    assert 0.0 < ReasoningGym()([near], entry=[item])[0] < 1.0
    assert ReasoningGym(partial_credit=False)([near, item["answer"]], entry=[item] * 2) == [0.0, 1.0]


@pytest.mark.parametrize("task", ["n_queens", "spiral_matrix", "binary_matrix", "countdown"])
def test_what_a_model_writes_is_never_run(task, tmp_path):
    target = tmp_path / "written"
    attack = f"[open({str(target)!r}, 'w').close()]"
    assert ReasoningGym()([attack], entry=[entry(task)]) == [0.0]
    assert not target.exists()


@pytest.mark.parametrize("task", ["n_queens", "spiral_matrix", "binary_matrix", "polynomial_multiplication"])
def test_the_right_answer_of_a_scorer_that_evaluates_still_counts(task):
    item = entry(task)
    answer = item["answer"] or item["metadata"]["valid_answers"][0]
    assert ReasoningGym()([answer], entry=[item]) == [1.0]


def test_arithmetic_reaches_a_scorer_that_evaluates():
    item = {"question": "", "answer": "", "metadata": {"numbers": [2, 3, 4], "target": 20}}
    item["metadata"]["source_dataset"] = "countdown"
    assert ReasoningGym()(["(2 + 3) * 4", "2 + 3 * 4"], entry=[item] * 2) == [1.0, 0.05]


@pytest.mark.parametrize(
    "answer",
    ["1 2 3", "[[1, 2], ['a', 'b']]", "(3 + 5)*2 - 1", "x**3 + 2*x**2", "sin(x)*exp(2*x)", "_ Q _\n_ _ Q"],
)
def test_literals_and_arithmetic_are_plain(answer):
    assert is_plain(answer)


@pytest.mark.parametrize(
    "answer",
    [
        *("__import__('os')", "().__class__", "x.y", "exit()", "print (1)", "(exit)()", "[exit][0]()"),
        *("1or exit()", "lambda: 1", "[1]*99999999", "(1,)*99999999", "9**9**9", "9 ** 9\n** 9"),
        *("9**(9**9)", "9**999", "(((9**99)**99)**99)**99", "1+" * 600 + "1"),
    ],
)
def test_code_and_towers_of_powers_are_not_plain(answer):
    assert not is_plain(answer)
