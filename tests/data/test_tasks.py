import re
import sys

import pytest

from grpo_fast.data.tasks import generate_rows


def test_a_missing_reasoning_gym_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'grpo-fast\[tasks\]'"):
        generate_rows("chain_sum", seed=0)


class TestGenerator:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("reasoning_gym")

    def test_rows_hold_question_answer_metadata_and_the_whole_entry(self):
        rows = generate_rows("chain_sum", seed=7, size=3, options={"min_terms": 2, "max_terms": 2})
        row = rows[0]
        assert len(rows) == 3
        assert set(row) == {"prompt", "question", "answer", "metadata", "entry"}
        assert row["prompt"] == row["question"] == row["entry"]["question"]
        assert row["metadata"]["num_terms"] == 2

    def test_one_seed_gives_one_dataset(self):
        assert generate_rows("chain_sum", seed=7, size=5) == generate_rows("chain_sum", seed=7, size=5)

    @pytest.mark.parametrize(
        ("task", "options", "message"),
        [
            ("chain_sun", {}, "no task 'chain_sun'"),
            ("chain_sun", {}, "did you mean 'chain_sum'?"),
            ("chain_sum", {"min_term": 2}, "did you mean 'min_terms'?"),
            ("chain_sum", {"seed": 2}, "dataset.options.seed is set by dataset.seed"),
            ("chain_sum", {"min_terms": 3, "max_terms": 2}, "chain_sum refuses dataset.options"),
        ],
    )
    def test_what_the_generator_cannot_do_is_refused(self, task, options, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            generate_rows(task, seed=0, options=options)
