"""What shapes have in common, what tells them apart, and the tables of their measurements."""

from __future__ import annotations

import pytest

from benchmarks.measure import FAILED, SKIPPED, Memory, Spread
from benchmarks.record import Measurement
from benchmarks.tables import DASH, console, label, number, print_measurements, shape_tables, skipped


@pytest.mark.parametrize(
    ("shape", "names", "text"),
    [
        (
            {"rows": "peaked", "tokens": 16_384, "mode": "forward_backward", "trainable": False},
            None,
            "peaked rows, N 16,384, forward + backward, frozen head",
        ),
        ({"rows": "flat", "dtype": "float32", "loss": "dpo"}, ["rows", "loss"], "flat rows, DPO"),
        ({"mode": "forward", "trainable": False}, None, "forward"),
        ({"model": "toy", "lora": None, "checkpointing": False, "prompts": 4}, None, "toy, prompts 4"),
        ({"checkpointing": True, "memory_gib": 1.5}, None, "checkpointing, memory gib 1.50"),
    ],
)
def test_a_shape_reads_as_a_person_would_say_it(shape, names, text):
    assert label(shape, names) == text


def test_numbers_have_three_digits():
    texts = [number(value) for value in (16_384, 18.0, 146.2, 0.01234, 1234.5, 7)]

    assert texts == ["16,384", "18.0", "146", "0.0123", "1,234", "7"]


def test_a_row_has_its_time_rates_memory_errors_phases_and_metrics_with_their_intervals():
    found = Measurement(
        "ours",
        {"model": "toy", "micro_batch_tokens": 16_384},
        time=Spread(12.5, 12.0, 13.0, 5),
        memory=Memory(3 << 20, None),
        accuracy={"logprob": 0.25},
        phases={"forward": 0.0101},
        metrics={"tokens_per_second": 5e3, "fit": 1.02, "fit_lower": 0.9, "fit_upper": 1.14},
        ceilings={"product_seconds": 5e-3},
    )

    (table,) = shape_tables([found])

    assert table.title == "toy, micro batch tokens 16,384"
    remark = "INACCURATE; forward 10.1 ms; fit 1.02 (0.90 to 1.14)"
    quartiles = f"12.0{DASH}13.0"
    assert table.rows == [["ours", "12.5", quartiles, "2.50", "5,000", "3", "2.5e-01", remark]]
    assert table.heads[-4:] == ["tokens/s", "allocator MiB", "|Δlogp|", "remark"]


def test_each_shape_is_a_table_the_fastest_first_and_who_was_skipped_stands_elsewhere(capsys):
    absent = Measurement("c", {"n": 1}, SKIPPED, "not installed")
    broken = Measurement("z", {"n": 1}, FAILED, "ValueError: no [file] at a_b/c_d")
    slow, fast = (
        Measurement(name, {"n": 1}, time=Spread(ms, ms, ms, 1)) for name, ms in (("a", 2), ("b", 1))
    )
    cells = [slow, Measurement("a", {"n": 2}), broken, fast, absent]

    tables = shape_tables(cells)

    assert [[row[0] for row in table.rows] for table in tables] == [["b", "a", "z"], ["a"]]
    assert list(skipped(cells)) == [("c", "not installed")]
    print_measurements(console(), [absent])
    assert capsys.readouterr().out == ""
    print_measurements(console(), [broken])
    assert "failed ValueError: no [file] at a_b/c_d" in capsys.readouterr().out
