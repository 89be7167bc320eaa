"""How shapes and numbers are said, and the tables of measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measure import Memory, Spread
from benchmarks.problem import Setting
from benchmarks.record import Measurement
from benchmarks.tables import DASH, console, label, number, print_measurements, shape_tables, skipped

SETTING = vars(Setting("peaked", 64, 32, 300, "forward_backward", True, "float32"))


@pytest.mark.parametrize(
    ("shape", "names", "text"),
    [
        ({"mode": "forward_backward", "trainable": False}, None, "forward + backward, frozen head"),
        ({"mode": "forward", "trainable": False}, None, "forward"),
        ({"rows": "flat", "dtype": "float32", "loss": "dpo"}, ["rows", "loss"], "flat rows, DPO"),
        ({"model": "toy", "lora": None, "kept": True, "tokens": 16_384}, None, "toy, kept, N 16,384"),
    ],
)
def test_a_shape_reads_as_a_person_would_say_it(shape, names, text):
    assert label(shape, names) == text


def test_numbers_have_three_digits():
    assert [number(value) for value in (16_384, 18.0, 146.2, 0.01234)] == ["16,384", "18.0", "146", "0.0123"]


def at(name: str, milliseconds: float, error: float = 1e-6, **shape: object) -> Measurement:
    return Measurement(
        name,
        SETTING | shape,
        time=Spread(milliseconds, 0.9 * milliseconds, 1.1 * milliseconds, 9),
        memory=Memory(5 << 20, None),
        accuracy={"logprob": error, "hidden_gradient": error},
        phases={"forward": 0.0101},
        metrics=Setting(**(SETTING | shape)).rates(milliseconds / 1e3) | {"fit": 1.02, "fit_lower": 0.9},
        ceilings={"product_seconds": 1e-3, "flops_per_second": 1e12},
    )


FULL = replace(at("TRL", 1.0, tokens=256), status="oom", time=None, memory=None, accuracy={}, metrics={})
BROKEN = replace(FULL, implementation="broken", status="failed", reason="no [file] <boom>")
ABSENT = Measurement("absent", SETTING, status="skipped", reason="not installed")
CELLS = [at("ours", 12.5), at("fast", 1.5, 0.3), at("ours", 7.0, tokens=256), FULL, BROKEN, ABSENT]


def test_each_shape_is_a_table_the_fastest_first_and_who_was_skipped_stands_elsewhere(capsys):
    small, large = shape_tables(CELLS, ["tokens"])

    assert (small.title, large.title) == ("N 64", "N 256")
    assert [[row[0] for row in table.rows] for table in (small, large)] == [
        ["fast", "ours"], ["ours", "TRL", "broken"]
    ]  # fmt: skip
    fast, ours = (dict(zip(small.heads, row, strict=True)) for row in small.rows)
    assert (ours["ms"], ours["quartiles"], ours["allocator MiB"]) == ("12.5", f"11.2{DASH}13.8", "5")
    assert (ours["|Δlogp|"], ours["remark"]) == ("1.0e-06", "forward 10.1 ms; fit 1.02 (0.90)")
    assert fast["remark"].startswith("INACCURATE") and "tokens/s" not in small.heads
    assert list(skipped(CELLS)) == [("absent", "not installed")]
    print_measurements(console(), [ABSENT, BROKEN])
    assert "failed no [file] <boom>" in capsys.readouterr().out
