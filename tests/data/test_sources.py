import json
import re
import socket

import pytest

from grpo_fast.data.config import DatasetConfig
from grpo_fast.data.sources import read_rows

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


def test_size_keeps_the_first_rows(write):
    assert read_rows(DatasetConfig(source=write(*ROWS), size=2)) == ROWS[:2]


def test_a_size_beyond_the_file_is_refused(write):
    with pytest.raises(ValueError, match=r"dataset\.size = 4, but .*rows\.jsonl has 3 rows"):
        read_rows(DatasetConfig(source=write(*ROWS), size=4))


def test_renamed_columns_have_the_new_name(write):
    rows = read_rows(DatasetConfig(source=write(*ROWS), rename={"answer": "solution"}))
    assert rows[0] == {"prompt": "one", "solution": 1}


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"answr": "x"}, "no column 'answr': there are answer, prompt; did you mean 'answer'?"),
        ({"answer": "prompt"}, "'answer' cannot become 'prompt', which is a column already"),
        ({"answer": "x", "prompt": "x"}, "gives two columns one name"),
        ({"answer": "completions"}, "'completions' has the name of an argument of the rewards"),
    ],
)
def test_a_rename_that_cannot_be_done_is_refused(write, rename, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_rows(DatasetConfig(source=write(*ROWS), rename=rename))


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl' has no rows"):
        read_rows(DatasetConfig(source=str(path)))


def test_a_missing_file_is_named():
    with pytest.raises(
        FileNotFoundError, match=r"dataset\.source = 'nowhere/rows\.jsonl': there is no such file"
    ):
        read_rows(DatasetConfig(source="nowhere/rows.jsonl"))


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt":\n')
    with pytest.raises(ValueError, match=r"cannot read dataset\.source = '.*broken\.jsonl'"):
        read_rows(DatasetConfig(source=str(path)))


def test_a_file_of_another_kind_is_refused_with_the_kinds_there_are(tmp_path):
    path = tmp_path / "rows.xlsx"
    path.touch()
    with pytest.raises(ValueError, match=r"the suffix must be one of \.jsonl, \.json, \.parquet, \.csv"):
        read_rows(DatasetConfig(source=str(path)))


def test_generator_options_are_refused_for_a_file(write):
    with pytest.raises(ValueError, match="only means something for reasoning_gym:TASK"):
        read_rows(DatasetConfig(source=write(*ROWS), options={"min_terms": 2}))


def test_a_hub_id_goes_to_datasets_with_its_name_and_split(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *args, **options: asked.append((args, options)) or iter(ROWS)
    )
    rows = read_rows(DatasetConfig(source="openai/gsm8k", name="main", split="test", size=2))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert rows == ROWS[:2]


def test_a_hub_failure_says_what_was_asked_and_what_else_a_source_may_be(monkeypatch):
    def fail(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ValueError, match=r"'openai/gsm8k' \(name None, split 'train'\).*no route.*\.jsonl"):
        read_rows(DatasetConfig(source="openai/gsm8k"))
