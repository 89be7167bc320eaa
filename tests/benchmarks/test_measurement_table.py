from __future__ import annotations

import io

from rich.console import Console

from benchmarks.measurement_table import measurement_tables, print_measurements
from benchmarks.record import FAILED, Measurement
from benchmarks.timing import Memory, Spread

SHAPE = {"model": "toy", "micro_batch_tokens": 16_384}


def printed(*found: Measurement) -> str:
    screen = Console(width=200, file=io.StringIO())
    print_measurements(screen, found)
    return screen.file.getvalue()


def test_a_row_has_its_time_rates_memory_and_phases():
    text = printed(
        Measurement(
            "ours",
            SHAPE,
            time=Spread(12.5, 12.0, 13.0, 5),
            memory=Memory(3 << 20, None),
            phases={"forward": 0.0101},
            metrics={"tokens_per_second": 5000.0, "grad_norm": 0.25},
        )
    )

    assert "model toy, micro batch tokens 16,384" in text
    for shown in ("12.5", "5,000", "forward 10.1", "grad norm 0.25", "allocator MiB"):
        assert shown in text
    assert "driver MiB" not in text


def test_a_failure_keeps_the_letters_of_its_reason():
    assert "failed ValueError: no [file] at a_b/c_d" in printed(
        Measurement("TRL", SHAPE, FAILED, "ValueError: no [file] at a_b/c_d")
    )


def test_an_exponent_stands_with_its_interval():
    metrics = {"time_exponent": 1.02, "time_exponent_lower": 0.9, "time_exponent_upper": 1.14}

    assert "time exponent 1.02 (0.90 to 1.14)" in printed(Measurement("ours", SHAPE, metrics=metrics))


def test_each_shape_is_a_table_and_nothing_prints_nothing():
    tables = measurement_tables(
        [Measurement("a", {"n": 1}), Measurement("a", {"n": 2}), Measurement("b", {"n": 1})]
    )

    assert [table.title for table in tables] == ["n 1", "n 2"]
    assert tables[0].row_count == 2
    assert printed() == ""
