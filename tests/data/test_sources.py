import json
import re
import socket
import sys

import pytest

from grpo_fast.data.config import DatasetConfig
from grpo_fast.data.sources import generate_rows, read_rows

ROWS = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2}, {"prompt": "three", "answer": 3}]


@pytest.fixture
def network(monkeypatch):
    """Hosts that somebody asked for; all are unknown."""
    asked = []

    def unknown(host, *args, **kwargs):
        asked.append(host)
        raise socket.gaierror(host)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_local_file_of_each_kind_is_read_without_network(tmp_path, network, suffix):
    from datasets import Dataset

    path = tmp_path / f"rows.{suffix}"
    dataset = Dataset.from_list(ROWS)
    if suffix == "json":
        path.write_text(json.dumps(ROWS))
    else:
        {"jsonl": dataset.to_json, "csv": dataset.to_csv, "parquet": dataset.to_parquet}[suffix](str(path))

    assert read_rows(DatasetConfig(source=str(path))) == ROWS
    assert network == []


def test_size_keeps_the_first_rows_and_renamed_columns_have_the_new_name(write):
    rows = read_rows(DatasetConfig(source=write(*ROWS), size=2, rename={"answer": "solution"}))
    assert rows == [{"prompt": "one", "solution": 1}, {"prompt": "two", "solution": 2}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"answr": "x"}}, "'answr'.*'answer'"),
        ({"rename": {"answer": "prompt"}}, "'answer'.*'prompt'.*column already"),
        ({"rename": {"answer": "x", "prompt": "x"}}, "one name"),
        ({"rename": {"answer": "completions"}}, "'completions'"),
        ({"size": 4}, r"dataset\.size = 4.* 3 rows"),
        ({"options": {"min_terms": 2}}, "reasoning_gym:TASK"),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_the_rows_are_refused(write, options, message):
    with pytest.raises(ValueError, match=message):
        read_rows(DatasetConfig(source=write(*ROWS), **options))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "", "no rows"),
        ("broken.jsonl", '{"prompt": "one"}\n{"prompt":\n', "JSON"),
        ("rows.xlsx", "", r"\.jsonl, \.json, \.parquet, \.csv"),
    ],
)
def test_a_file_that_holds_no_rows_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*{message}"):
        read_rows(DatasetConfig(source=str(tmp_path / name)))


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"'nowhere/rows\.jsonl'"):
        read_rows(DatasetConfig(source="nowhere/rows.jsonl"))


def test_a_hub_id_goes_to_datasets_and_a_failure_says_what_else_a_source_may_be(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return iter(ROWS) if args[1] else next(iter(()))

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    config = DatasetConfig(source="openai/gsm8k", name="main", split="test", size=2)
    assert read_rows(config) == ROWS[:2]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    with pytest.raises(ValueError, match=r"'openai/gsm8k' \(name None, split 'train'\).*\.jsonl"):
        read_rows(DatasetConfig(source="openai/gsm8k"))


def test_a_missing_reasoning_gym_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'grpo-fast\[tasks\]'"):
        generate_rows("chain_sum", seed=0)


def test_generated_rows_hold_question_answer_metadata_and_the_whole_entry():
    pytest.importorskip("reasoning_gym")
    rows = generate_rows("chain_sum", seed=7, size=3, options={"min_terms": 2, "max_terms": 2})
    assert len(rows) == 3
    assert set(rows[0]) == {"prompt", "question", "answer", "metadata", "entry"}
    assert rows[0]["prompt"] == rows[0]["question"] == rows[0]["entry"]["question"]
    assert rows[0]["metadata"]["num_terms"] == 2
    later = generate_rows("chain_sum", seed=8, size=2, options={"min_terms": 2, "max_terms": 2})
    assert [row["question"] for row in rows[1:]] == [row["question"] for row in later]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sun", {}, "'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "'min_terms'"),
        ("chain_sum", {"seed": 2}, "dataset.seed"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "chain_sum refuses"),
    ],
)
def test_what_the_generator_cannot_do_is_refused(task, options, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=re.escape(message)):
        generate_rows(task, seed=0, options=options)
