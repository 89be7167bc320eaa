"""Records as one page."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.charts import MEMORY, TIME, bars, lines, pareto, phases, roofline, slices, styles_of
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
STYLES = styles_of(["ours", "TRL", "fast"])


def test_a_page_of_several_records_has_every_plot_every_cell_and_provenance_and_works_offline(tmp_path):
    about = {"gpu_states": [{"clocks.sm": "1980 MHz"}], "options": {"minutes": 8}}
    fit = Measurement("ours", {"fit": "tokens"}, metrics={"time_exponent": 0.98})
    step = Measurement("ours", {"model": "toy"}, metrics={"tokens_per_second": 9.0})
    records = {
        "head.json": Record("head", CELLS, ENVIRONMENT, **about),
        "scaling.json": Record("scaling", [*CELLS, fit], ENVIRONMENT),
        "empty.json": Record("train", [], ENVIRONMENT),
        "step.json": Record("step", [step], ENVIRONMENT, stopped="interrupted", not_measured=[SETTING]),
    }
    for name, record in records.items():
        write_json(tmp_path / name, record)

    out = tmp_path / "out.html"
    assert main(["report", *(str(tmp_path / name) for name in records), f"--html={out}"]) == 0

    page = out.read_text()
    assert "LM head, Scaling, Training, Policy update" in page
    headings = ("Time at one shape", "Time against size", "Memory", "Accuracy against time", "Roofline")
    for heading in (*headings, "Throughput at one shape"):
        assert f"<h3>{heading}</h3>" in page
    cells = ("out of memory", "wrong result", "RuntimeError: &lt;boom&gt;", "not installed: no module")
    origin = ("python -m benchmarks head", "0123456789 with changes", "1980 MHz", "a &lt;machine&gt;")
    for text in (
        *cells,
        *origin,
        "Not complete: interrupted",
        "1 shapes were not measured",
        "Nothing was measured",
    ):
        assert text in page
    concluded = page[page.index("scaling.json") :]
    assert re.search(r"<details open>\s*<summary>fit tokens</summary>.*?0\.980", concluded, re.DOTALL)

    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert drawings and all(ElementTree.fromstring(drawing) is not None for drawing in drawings)
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert "<script" not in page and "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert not re.search(r"(?:fill|stroke): #0[0-9]", page)  # a colour that stands for the page's


@pytest.mark.parametrize(
    ("record_name", "html", "named"), [("none.json", "o.html", "none.json"), ("", "no/o.html", "folder")]
)
def test_what_cannot_be_read_or_written_is_named(tmp_path, capsys, record_name, html, named):
    assert main(["report", str(tmp_path / record_name), f"--html={tmp_path / html}"]) == 2
    assert named in capsys.readouterr().err


def test_slices_vary_along_one_axis_alone_and_the_longest_comes_first():
    shapes = ((64, 32), (128, 32), (64, 16), (64, 8), (256, 32))
    cells = [Measurement("ours", {"tokens": n, "hidden": h}) for n, h in shapes]

    by_tokens, by_hidden = slices(cells, "tokens"), slices(cells, "hidden")

    assert [part.fixed for part in by_tokens] == [{"hidden": 32}]
    assert len(by_tokens[0].cells) == 3
    assert [part.fixed for part in by_hidden] == [{"tokens": 64}]
    assert slices([Measurement("ours", {"mode": mode}) for mode in "ab"], "mode") == []


def test_what_has_no_number_is_not_drawn_but_for_failures_beside_numbers():
    (part,) = slices([cell for cell in CELLS if cell.implementation in STYLES], "tokens")
    unknown = replace(FAST, accuracy={"hidden_gradient": float("nan")})

    failed = bars([cell for cell in CELLS if cell.shape == FULL.shape], TIME, "a shape")
    assert "out of memory" in failed.svg and "failed" in failed.svg
    assert bars([FULL], MEMORY, "") is None
    assert lines(replace(part, cells=[FULL]), TIME, STYLES, "") is None
    assert pareto([FAST, unknown], "hidden_gradient", "", STYLES, "") is None
    assert phases([replace(FAST, phases={"a": 0.1, "b": 0.2})], "").legend == ("a", "b")
    assert phases([FAST], "") is None
    assert roofline([Measurement("ours", {})], 40e9, {}) is None


def test_the_roof_is_the_fastest_product_and_copy_of_the_run():
    assert "1.00 TFLOP/s, 40.0 GB/s" in roofline(CELLS, 40e9, STYLES).detail


def test_every_implementation_looks_different():
    names = ["ours", "ours, exact", *(f"peer {i}" for i in range(14))]

    looks = {(style.colour, str(style.dash), style.marker) for style in styles_of(names).values()}
    assert len(looks) == len(names)
