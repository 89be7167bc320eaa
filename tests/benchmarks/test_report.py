"""Records as one page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.charts import MEMORY, TIME, bars, lines, pareto, phases, roofline, slices, styles_of
from benchmarks.measure import Memory, Spread
from benchmarks.problem import Setting
from benchmarks.record import Measurement, Record
from benchmarks.report import render

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


def record(*cells: Measurement, kind: str = "head", **about: object) -> Record:
    return Record(kind, list(cells), ENVIRONMENT, **about)


def page_of(found: Record) -> str:
    return render([(Path("run.json"), found)])


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_a_page_has_every_plot_every_cell_and_where_it_came_from():
    page = page_of(record(*CELLS, gpu_states=[{"clocks.sm": "1980 MHz"}], options={"minutes": 8}))

    for heading in ("Time at one shape", "Time against size", "Memory", "Accuracy against time", "Roofline"):
        assert f"<h3>{heading}</h3>" in page
    assert "out of memory" in page
    assert "wrong result" in page
    assert "RuntimeError: &lt;boom&gt;" in page
    assert "not installed: no module" in page
    assert "python -m benchmarks head" in page
    assert "0123456789 with changes" in page
    assert "1980 MHz" in page
    assert drawings(page)


def test_a_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows():
    page = page_of(record(*CELLS))

    assert "a &lt;machine&gt;" in page
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xlink:href="#[^"]*"', "", page))
    assert "default-src 'none'" in page
    assert "#0" not in "".join(re.findall(r"(?:fill|stroke): (#0[0-9]+)", page))


def test_no_two_drawings_share_an_identifier():
    page = render([(Path("a.json"), record(*CELLS)), (Path("b.json"), record(*CELLS, kind="kernels"))])

    names = [name for name in re.findall(r'\bid="([^"]+)"', page)]
    assert len(names) == len(set(names))


def test_an_interrupted_or_empty_run_says_so():
    page = page_of(record(stopped="interrupted", not_measured=[SETTING]))

    assert "Not complete: interrupted" in page
    assert "1 shapes were not measured" in page
    assert "Nothing was measured" in page


def test_what_was_concluded_comes_first_and_open():
    fit = Measurement("ours", {"fit": "tokens"}, metrics={"time_exponent": 0.98})

    page = page_of(record(*CELLS, fit, kind="scaling"))

    first = page[page.index("All measurements") :]
    assert re.search(r"<details open>\s*<summary>fit tokens</summary>", first)
    assert "0.980" in first


def test_the_command_writes_a_page_of_several_records(tmp_path, capsys):
    for name, kind in (("a.json", "step"), ("b.json", "kernels")):
        document = {"schema": 1, "kind": kind, "environment": ENVIRONMENT}
        cells = [{"implementation": "ours", "shape": {"model": "toy"}, "metrics": {"tokens_per_second": 9.0}}]
        (tmp_path / name).write_text(json.dumps(document | {"cells": cells}))
    out = tmp_path / "out.html"

    assert main(["report", str(tmp_path / "a.json"), str(tmp_path / "b.json"), f"--html={out}"]) == 0
    page = out.read_text()
    assert "Policy update, Kernels" in page
    assert "Throughput at one shape" in page
    assert str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record_name", "html", "named"), [("none.json", "o.html", "none.json"), ("", "no/o.html", "folder")]
)
def test_what_cannot_be_read_or_written_is_named(tmp_path, capsys, record_name, html, named):
    assert main(["report", str(tmp_path / record_name), f"--html={tmp_path / html}"]) == 2
    assert named in capsys.readouterr().err


def test_bars_name_what_failed():
    drawn = bars([cell for cell in CELLS if cell.shape == FULL.shape], TIME, "a shape")

    assert "out of memory" in drawn.svg
    assert "failed" in drawn.svg


def test_slices_vary_along_one_axis_alone_and_the_longest_comes_first():
    shapes = ((64, 32), (128, 32), (64, 16), (64, 8), (256, 32))
    cells = [Measurement("ours", {"tokens": n, "hidden": h}) for n, h in shapes]

    by_tokens, by_hidden = slices(cells, "tokens"), slices(cells, "hidden")

    assert [part.fixed for part in by_tokens] == [{"hidden": 32}]
    assert len(by_tokens[0].cells) == 3
    assert [part.fixed for part in by_hidden] == [{"tokens": 64}]
    assert slices([Measurement("ours", {"mode": mode}) for mode in "ab"], "mode") == []


def test_what_has_no_number_is_not_drawn():
    styles = styles_of(["ours", "TRL", "fast"])
    (part,) = slices([cell for cell in CELLS if cell.implementation in styles], "tokens")
    unknown = replace(FAST, accuracy={"hidden_gradient": float("nan")})

    assert lines(part, TIME, styles, "") is not None
    assert lines(replace(part, cells=[FULL]), TIME, styles, "") is None
    assert bars([FULL], MEMORY, "") is None
    assert pareto([at("ours", 2.0), FAST], "hidden_gradient", "Error", styles, "") is not None
    assert pareto([FAST, unknown], "hidden_gradient", "", styles, "") is None
    assert phases([replace(FAST, phases={"a": 0.1, "b": 0.2})], "").legend == ("a", "b")
    assert phases([FAST], "") is None
    assert roofline([Measurement("ours", {})], 40e9, {}) is None


def test_the_roof_is_the_fastest_product_and_copy_of_the_run():
    drawn = roofline(CELLS, 40e9, styles_of(["ours", "TRL", "fast"]))

    assert "1.00 TFLOP/s, 40.0 GB/s" in drawn.detail


def test_every_implementation_looks_different():
    names = ["ours", "ours, exact", *(f"peer {i}" for i in range(14))]

    looks = {(style.colour, str(style.dash), style.marker) for style in styles_of(names).values()}
    assert len(looks) == len(names)
