"""Records as one page."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import Memory, Spread
from benchmarks.problem import Setting
from benchmarks.record import Measurement, Record, write_json

ENVIRONMENT = {
    "benchmark_device": "a <machine>",
    "versions": {"torch": "2.13.0"},
    "copy_gigabytes_per_second": 40.0,
    "started": "2026-11-20T09:00:00+00:00",
    "command": ["python", "-m", "benchmarks", "head"],
    "git": {"revision": "0123456789abcdef", "changed": True},
}
SETTING = {
    "rows": "peaked",
    "tokens": 64,
    "hidden": 32,
    "vocabulary": 300,
    "mode": "forward_backward",
    "trainable": True,
    "dtype": "float32",
}


def at(name: str, milliseconds: float, error: float = 1e-6, **shape: object) -> Measurement:
    return Measurement(
        name,
        SETTING | shape,
        time=Spread(milliseconds, 0.9 * milliseconds, 1.1 * milliseconds, 9),
        memory=Memory(5 << 20, 6 << 20),
        accuracy={"logprob": error, "hidden_gradient": error},
        metrics=Setting(**(SETTING | shape)).rates(milliseconds / 1e3),
        ceilings={"product_seconds": 1e-3, "flops_per_second": 1e12},
    )


FAST = at("fast", 1.5, error=0.3)
FULL = replace(at("TRL", 1.0, tokens=256), status="oom", time=None, memory=None, accuracy={}, metrics={})
BROKEN = replace(FULL, implementation="broken", status="failed", reason="RuntimeError: <boom>")
ABSENT = Measurement("absent", SETTING, status="skipped", reason="not installed: no module")
CELLS = [at("ours", 2.0), at("TRL", 8.0), FAST, at("ours", 7.0, tokens=256), FULL, BROKEN, ABSENT]


def test_a_page_of_several_records_has_plots_every_cell_and_provenance_and_works_offline(tmp_path):
    about = {"gpu_states": [{"clocks.sm": "1980 MHz"}], "options": {"minutes": 8}}
    fit = Measurement("ours", {"fit": "tokens"}, metrics={"time_exponent": 0.98})
    group = Measurement("ours", {"model": "toy"}, metrics={"largest_group": 9.0})
    records = {
        "head.json": Record("head", CELLS, ENVIRONMENT, **about),
        "scaling.json": Record("scaling", [*CELLS, fit], ENVIRONMENT),
        "empty.json": Record("train", [], ENVIRONMENT),
        "group.json": Record("group", [group], ENVIRONMENT, stopped="interrupted", not_measured=[SETTING]),
    }
    for name, record in records.items():
        write_json(tmp_path / name, record)

    out = tmp_path / "out.html"
    assert main(["report", *(str(tmp_path / name) for name in records), f"--html={out}"]) == 0

    page = out.read_text()
    for text in (
        *("out of memory", "INACCURATE", "RuntimeError: &lt;boom&gt;", "not installed: no module", "0.980"),
        *("python -m benchmarks head", "0123456789 with changes", "1980 MHz", "a &lt;machine&gt;"),
        *("Not complete: interrupted", "1 shapes were not measured", "Nothing was measured"),
    ):
        assert text in page
    assert "<script" not in page and "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    head = page[: page.index("scaling.json")]
    assert re.findall(r'alt="(.*?)"', head) == [
        *("Time, ms, N 64", "Time, ms, N 256"),
        *(f"Peak memory beyond the inputs, MiB, N {tokens}" for tokens in (64, 256)),
        "Time, ms, against tokens, ",
        "Peak memory beyond the inputs, MiB, against tokens, ",
        "Error of dX, against time, N 64",
        "Error of |Δlogp|, against time, N 64",
        "TFLOP/s, against FLOPs per byte, ceilings measured here: 1.00 TFLOP/s, 40.0 GB/s",
    ]
    drawn = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", page)]
    texts = [{text.strip() for text in ElementTree.fromstring(image).itertext()} for image in drawn]
    assert [{"ours", "TRL", "fast"} <= found for found in texts[:2]] == [True, False]
    assert "Largest group, completions, toy" in page


@pytest.mark.parametrize(
    ("record_name", "html", "named"), [("none.json", "o.html", "none.json"), ("", "no/o.html", "folder")]
)
def test_what_cannot_be_read_or_written_is_named(tmp_path, capsys, record_name, html, named):
    assert main(["report", str(tmp_path / record_name), f"--html={tmp_path / html}"]) == 2
    assert named in capsys.readouterr().err
