import csv
import functools
import gzip
import json
import os
import re
import socket
import sys
from itertools import count
from types import SimpleNamespace

import datasets
import pytest

from grpo_fast.config.data import DatasetConfig
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


def hub_holds(monkeypatch, kind, **files):
    """Let every hub id be these files."""
    build = functools.partial(datasets.load_dataset_builder, kind, **files)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda source, name, **how: build(**how))


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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_dates_kinds_of_numbers_and_nested_keys_stay_as_they_are(tmp_path, suffix):
    from datasets import Dataset

    rows = [
        {"prompt": "a", "n": {"value": 1}, "d": "2020-01-01", "m": {"x": 1}},
        {"prompt": "b", "n": [1, "two"], "d": "b", "m": {"y": 2}},
    ]
    path = tmp_path / f"rows.{suffix}"
    path.write_text("\n".join(map(json.dumps, rows)))
    if suffix == "parquet":
        Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
    found = read_rows(DatasetConfig(source=str(path), rename={"d": "day"}, size=2))
    assert found == [{("day" if key == "d" else key): row[key] for key in row} for row in rows]
    assert len(read_rows(DatasetConfig(source=str(path), size=1))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"answr": "x"}}, "'answr'.*'answer'"),
        ({"rename": {"answer": "prompt"}}, "'answer'.*'prompt'.*column already"),
        ({"rename": {"answer": "x", "prompt": "x"}}, "one name"),
        ({"rename": {"answer": "completions"}}, "'completions'"),
        ({"size": 4}, r"dataset\.size = 4.* 3 rows"),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_the_rows_are_refused(write, options, message):
    with pytest.raises(ValueError, match=message):
        read_rows(DatasetConfig(source=write(*ROWS), **options))


GOOD = b'{"prompt": "one"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"", "no rows"),
        ("rows.jsonl", GOOD + b'\n{"prompt": "two" "answer": 1}\n', "line 3: .*delimiter.* column 18"),
        ("rows.jsonl", GOOD + b'{"a": ' + 10**5 * b"[" + b"\n", "line 2: nested too deeply"),
        ("rows.jsonl", b'{\n  "prompt": "one"\n}\n', "line 1: .*one JSON object per line"),
        ("rows.jsonl", GOOD + b'"two"\n', "row 1: a row must be an object.*'two'"),
        ("rows.jsonl", GOOD + b'{"a": {"b": 1, "b": 2}}\n', "line 2: an object has the key 'b' twice"),
        ("rows.json", b'[\n {"prompt": "one"},\n {"prompt": "two",}\n]', "line 3 column"),
        ("rows.json", b'[{"prompt": "one"}, "two"]', "row 1: a row must be an object.*'two'"),
        ("rows.jsonl", GOOD + b'{"prompt": "caf\xe9"}\n', "line 2: is no UTF-8, near .*caf.xe9"),
        ("rows.csv", b"prompt,answer\none,1\ncaf\xe9,2\n", "line 3: is no UTF-8"),
        ("rows.csv", b"prompt,answer\none,1\ntwo,2,3\n", "line 3: 3 fields, but the header has 2"),
        ("rows.csv", b"prompt,answer\none,1\ntwo\n", "line 3: 1 fields, but the header has 2"),
        ("rows.csv", b"prompt,prompt\none,1\n", "the header names 'prompt' twice"),
        ("rows.tsv", b"prompt\tanswer\none 1\n", "line 2: 1 fields"),
        ("rows.csv", b'prompt,answer\n"one,1\ntwo,2\n', "line 2: .*begins with a quote"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1", "parquet"),
        ("rows.xlsx", b"", r"\.jsonl, \.json, \.parquet, \.csv"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_file_that_is_none_is_named_with_the_place_and_what_stands_there(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*{message}"):
        read_rows(DatasetConfig(source=str(tmp_path / name)))


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"prompt": "one", "answer": 1}\r\n\r\n{"prompt": "caf\xc3\xa9"}',
        b'\xef\xbb\xbf\n[{"prompt": "one", "answer": 1},\n{"prompt": "caf\xc3\xa9"}]\n',
    ],
    ids=["lines", "array"],
)
def test_a_byte_order_mark_blank_lines_and_absent_columns_do_no_harm(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    rows = read_rows(DatasetConfig(source=str(tmp_path / "rows.jsonl")))
    assert rows == [{"prompt": "one", "answer": 1}, {"prompt": "café", "answer": None}]


def test_a_folder_holds_splits_and_a_missing_one_is_refused(tmp_path, write):
    from datasets import Dataset, DatasetDict

    write(*ROWS, name="train.jsonl")
    (tmp_path / "main").mkdir()
    Dataset.from_list(ROWS[:2]).to_parquet(str(tmp_path / "main" / "test-00000-of-00002.parquet"))
    Dataset.from_list(ROWS[2:]).to_parquet(str(tmp_path / "main" / "test-00001-of-00002.parquet"))
    assert read_rows(DatasetConfig(source=str(tmp_path))) == ROWS
    assert read_rows(DatasetConfig(source=str(tmp_path), name="main", split="test")) == ROWS
    with pytest.raises(ValueError, match=r"dataset\.split = 'validation'.*'train\.jsonl'"):
        read_rows(DatasetConfig(source=str(tmp_path), split="validation"))
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "saved"))
    assert read_rows(DatasetConfig(source=str(tmp_path / "saved"), split="test")) == ROWS
    with pytest.raises(ValueError, match=r"dataset\.split = 'train': there are test"):
        read_rows(DatasetConfig(source=str(tmp_path / "saved")))


def test_a_csv_column_has_one_type_in_all_files(tmp_path):
    for name, cell in {"train-0.csv": "7", "train-1.csv": "007"}.items():
        (tmp_path / name).write_text(f"prompt,answer\nq,{cell}\n")
    assert [row["answer"] for row in read_rows(DatasetConfig(source=str(tmp_path)))] == ["7", "007"]


@pytest.mark.parametrize(
    ("code", "rows"),
    [
        ("def f(row, idx):\n return {'n': idx}", [{"a": "x", "n": 0}, {"a": "y", "n": 1}]),
        (
            "def f(cfg, *args, **kwargs):\n def g(example, tokenizer=None):\n"
            "  return {'b': (cfg.split, tokenizer)}\n return g, {'remove_columns': ['a']}",
            [{"n": None, "b": ["train", "T"]}, {"n": 1, "b": ["train", "T"]}],
        ),
        (
            "def f(_cfg, dataset_idx):\n g = lambda row: {'a': dataset_idx}\n"
            " return g, {'remove_columns': '__all__'}",
            [{"a": 0}, {"a": 0}],
        ),
        (
            "import os\ndef f(row):\n row['a'] += '?'; os.chdir('/'); return {'n': row['a']}",
            [{"a": "x", "n": "x?"}, {"a": "y", "n": "y?"}],
        ),
        (
            "import numpy as np\nsame = [1]\ndef f(row):\n same[0] += 1\n"
            " return {'a': same, 'n': {'e': np.arange(2), 'f': np.float32(0.5)}}",
            [{"a": [2], "n": {"e": [0, 1], "f": 0.5}}, {"a": [3], "n": {"e": [0, 1], "f": 0.5}}],
        ),
    ],
    ids=["with indices", "axolotl", "all removed", "changes its input", "arrays"],
)
def test_a_transform_adds_and_replaces_columns_of_a_copied_row(tmp_path, write, monkeypatch, code, rows):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code)
    config = DatasetConfig(source=write({"a": "x"}, {"a": "y", "n": 1}), transform="own.py:f")
    assert read_rows(config, tokenizer="T") == rows and os.getcwd() == str(tmp_path)


def test_a_slow_transform_logs_its_progress(tmp_path, write, monkeypatch, caplog):
    (tmp_path / "own.py").write_text("def f(row): return {'b': row['a']}")
    config = DatasetConfig(source=write({"a": 1}, {"a": 2}), transform=f"{tmp_path}/own.py:f")
    monkeypatch.setattr("grpo_fast.data.transform.time", SimpleNamespace(monotonic=count(0, 8).__next__))
    read_rows(config)
    assert "dataset.transform: 2 of 2 rows" in caplog.text


def test_rows_are_cut_to_size_then_transformed_then_renamed(tmp_path, write):
    (tmp_path / "own.py").write_text("def f(row): return {'prompt': 10 // row['n']}")
    config = {"source": write({"n": 5}, {"n": 2}, {"n": 0}), "transform": f"{tmp_path}/own.py:f", "size": 2}
    found = read_rows(DatasetConfig(**config, rename={"prompt": "q", "n": "prompt"}))
    assert found == [{"prompt": 5, "q": 2}, {"prompt": 2, "q": 5}]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("g = 1", "own.py has no 'f': there are none"),
        ("def f(row):\n return {'a': row['q']}", r"row 0: .*raised KeyError: 'q', at .*own\.py:2: return"),
        (
            "def f(row):\n if row['n']:\n  exit(3)\n return {}",
            r"row 1: .*raised SystemExit: 3, at .*:3: exit",
        ),
        ("def f(row): pass", r"row 0: .*returned None: to leave rows out, filter the data before"),
        (
            "def f(row, index): return {}",
            r"has the signature \(row, index\) \(missing .*'index'\): .* tokenizer or idx",
        ),
        ("def f(row): return {'prompt': [q + '?' for q in row['a']]}", r"several prompts, .*batched=True"),
        (
            "def f(row): return {'b': [{'c': {1}}]}",
            r"returned b \[0\] c = \{1\}, a set; return text, numbers",
        ),
        ("def f(cfg): return repr, {'remove_columns': ['q']}", "'q'.*columns of the data"),
        ("def f(cfg): return repr, {'batched': True}", "'batched'.*remove_columns"),
    ],
)
def test_a_transform_that_makes_no_columns_is_refused_with_its_row(
    tmp_path, write, monkeypatch, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code)
    source = write({"a": "xy"}, {"a": "y", "n": 1})
    with pytest.raises(ValueError, match=f"dataset.transform = 'own.py:f'.*{message}|{message}"):
        read_rows(DatasetConfig(source=source, transform="own.py:f"))


@pytest.mark.parametrize("source", ["nowhere/rows.jsonl", "./rows", "../rows.txt", "/nowhere/rows"])
def test_a_missing_file_is_named_and_not_asked_for_on_the_hub(network, source):
    with pytest.raises(FileNotFoundError, match=f"'{re.escape(source)}': there is no such file"):
        read_rows(DatasetConfig(source=source))
    assert network == []


def test_a_hub_id_goes_to_datasets_and_a_failure_names_other_sources(monkeypatch):
    asked = []

    def load_dataset_builder(*args):
        asked.append(args)
        rows = SimpleNamespace(name="parquet", download_and_prepare=bool, as_dataset=lambda split: iter(ROWS))
        return rows if args[1] else next(iter(()))

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    config = DatasetConfig(source="openai/gsm8k", name="main", split="test", size=2)
    assert read_rows(config) == ROWS[:2]
    assert asked == [("openai/gsm8k", "main")]
    with pytest.raises(ValueError, match=r"'openai/gsm8k' \(name None, split 'train'\).*\.jsonl"):
        read_rows(DatasetConfig(source="openai/gsm8k"))


def test_a_missing_reasoning_gym_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'grpo-fast\[reasoning-gym\]'"):
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


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["7", "", "-100"], [7, None, -100]),
        (["0.5", "2.0", ""], [0.5, 2.0, None]),
        (["True", "False", ""], [True, False, None]),
        (["123456789012345678901234567890", "8"], [123456789012345678901234567890, 8]),
        *(
            ([*cells, ""], [*cells, None])
            for cells in (["007", "12"], ["NA", "US"], ["None", "null"], ["nan"])
        ),
        *(
            ([*cells, ""], [*cells, None])
            for cells in (["3.10", "2.50"], ["1e5", "3"], ["7", "2.5"], ["inf"])
        ),
        *(([*cells, ""], [*cells, None]) for cells in (["True", "false"], ["2020-01-01"], ["a\u2028b, \n"])),
        ([*map(str, range(3000)), "abc"], [*map(str, range(3000)), "abc"]),
    ],
    ids=lambda cells: str(cells[:2]),
)
def test_a_csv_cell_keeps_its_text_where_a_number_would_change_it(tmp_path, monkeypatch, cells, values):
    table = [("prompt", "answer"), *((f"q{i}", c) for i, c in enumerate(cells))]
    paths = [tmp_path / "rows.csv", tmp_path / "rows.tsv"]
    for path, delimiter in zip(paths, ",\t", strict=True):
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(table)
    hub_holds(monkeypatch, "csv", data_files=str(paths[0]))
    for source in (*map(str, paths), "owner/csv-on-the-hub"):
        rows = read_rows(DatasetConfig(source=source))
        assert [row["answer"] for row in rows] == values and rows[0]["prompt"] == "q0"


@pytest.mark.parametrize(
    ("data", "options", "split"),
    [
        (b"caf\xc3\xa9,007\nNA,1\n", {"column_names": ["prompt", "answer"]}, "train"),
        (b"prompt,answer\ncaf\xe9,007\nNA,1\n", {"encoding": "latin-1"}, "train"),
        (gzip.compress(b"prompt;answer\ncaf\xc3\xa9;007\nNA;1\n", mtime=0), {"sep": ";"}, "train"),
        (b"prompt,answer\ncaf\xc3\xa9,007\nNA,1\nx,2\n", {}, "train[:2]"),
    ],
)
def test_a_csv_of_the_hub_is_read_as_its_readme_says(tmp_path, monkeypatch, data, options, split):
    path = tmp_path / ("train.csv.gz" if data.startswith(b"\x1f") else "train.csv")
    path.write_bytes(data)
    hub_holds(monkeypatch, "csv", data_files={"train": str(path)}, **options)
    rows = read_rows(DatasetConfig(source="owner/name", split=split))
    assert rows == [{"prompt": "café", "answer": "007"}, {"prompt": "NA", "answer": "1"}]
    with pytest.raises(ValueError, match=r"split 'test'.*Should be one of \['train'\]"):
        read_rows(DatasetConfig(source="owner/name", split="test"))
