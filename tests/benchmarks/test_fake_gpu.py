"""Every line that a GPU alone runs, once, on tensors of the CPU that say they are on an H200.

It guards the first run on a real one: what fails here fails there. The kernels are interpreted, events read
the wall clock, and the allocator's numbers are made up, so that no figure means anything.
"""

from __future__ import annotations

import functools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    ceilings,
    cell,
    head,
    kernels,
    machine,
    profile_head,
    scaling,
    smoke,
    sparse,
    timing,
    tune,
)
from benchmarks.__main__ import main
from benchmarks.grid import Grid, cells
from benchmarks.peers import Peer, all_peers, choose
from benchmarks.problem import MODES, Problem, Run, Setting
from grpo_fast.head import cuda, operator, tuning

pytest.importorskip("triton")
TINY = (4, 16, 130)  # N, H, V
FACTORIES = "arange empty full linspace ones rand randint randn tensor zeros"
METHODS = "new_empty new_full new_ones new_zeros to"
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150 << 30,
    multi_processor_count=2,
    L2_cache_size=1,
    shared_memory_per_block_optin=232_448,
    uuid="0",
)


class WallClockEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: WallClockEvent) -> float:
        return 1e3 * (later.at - self.at)


class Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with the CPU for each CUDA device among its arguments."""

    def swapped(value: Any) -> Any:
        return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*map(swapped, arguments), **{name: swapped(value) for name, value in options.items()})

    return call


def in_float32(product: Callable[..., Any]) -> Callable[..., Any]:
    """`mm` and `addmm` of half precision with a float32 result, which a GPU alone has."""

    @functools.wraps(product)
    def call(*operands: torch.Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        return product(*(x.to(out_dtype or x.dtype) for x in operands), **options)

    return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Counts how often its cache was emptied."""
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("a GPU is there: the benchmarks themselves run on it")
    found = SimpleNamespace(emptied=0)

    def empty_cache() -> None:
        found.emptied += 1

    facts = {
        "is_available": True, "get_device_properties": H200, "get_device_name": H200.name, "device_count": 1,
        "get_device_capability": (9, 0), "synchronize": None, "mem_get_info": (140 << 30, 141 << 30),
        "memory_allocated": 1 << 20, "max_memory_allocated": 3 << 20, "max_memory_reserved": 4 << 20,
        "reset_peak_memory_stats": None, "is_current_stream_capturing": False, "current_device": 0,
    }  # fmt: skip
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "Event", WallClockEvent)
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "not-built.so")  # no fake runs compiled code
    monkeypatch.setattr(torch, "Generator", Generator)
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, in_float32(getattr(torch, name)))
    for name in FACTORIES.split():
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in METHODS.split():
        monkeypatch.setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    device_of = torch._C.TensorBase.device.__get__

    def device(tensor: torch.Tensor) -> torch.device:
        real = device_of(tensor)
        return torch.device("cuda", 0) if real.type == "cpu" else real

    monkeypatch.setattr(torch.Tensor, "device", property(device), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: device(t).type == "cuda"), raising=False)
    for sizes, name in ((timing._COPY_BYTES, "cuda"), (ceilings._COPY_BYTES, "cuda")):
        monkeypatch.setitem(sizes, name, 1 << 16)
    for sizes in (ceilings._SQUARE, machine._SIDE):
        monkeypatch.setitem(sizes, "cuda", 64)
    operator.device_facts.cache_clear()
    yield found
    operator.device_facts.cache_clear()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that a command takes when it is given none."""
    n, h, v = TINY

    def grid(kind: str, rows: tuple[str, ...]) -> Grid:
        assert kind == "cuda"
        return Grid(rows, (n,), (h,), (v,), MODES, (True, False), "bfloat16")

    monkeypatch.setattr(head, "default_grid", grid)
    monkeypatch.setitem(kernels._DEFAULTS, "cuda", ((n,), (h,), (v,)))
    monkeypatch.setitem(smoke._SIZES, "cuda", (("histogram", n, h, v),))


def of_tiny(*arguments: str) -> list[str]:
    names = ("--tokens", "--hidden", "--vocab")
    sizes = [word for pair in zip(names, map(str, TINY), strict=True) for word in pair]
    return [*arguments, *sizes, "--repeats", "1", "--minutes", "30"]


def test_the_head_without_sizes_measures_rows_made_like_a_models(gpu, tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(head, "cells", lambda *grid: cells(*grid)[:1])
    out, page = tmp_path / "head.json", tmp_path / "head.html"

    code = main(["head", "--impl", "ours", "torch full", "--repeats", "1", "--json", str(out)])

    record = json.loads(out.read_text())
    (found,) = record["cells"]
    assert (code, found["setting"]["rows"], found["setting"]["dtype"]) == (0, "histogram", "bfloat16")
    assert record["environment"]["benchmark_device"] == H200.name
    assert found["product"]["samples"] == 1
    for result in found["results"]:
        assert result["state"] == "ok", result
        assert result["accuracy"]["logprob"] < (0.1 if result["name"].startswith("torch") else 1e-4), result
        assert result["memory"] == {"allocator": 2 << 20, "driver": 0}
    assert "Goals of the design" in capsys.readouterr().out
    if find_spec("matplotlib"):  # which a machine that only measures needs not have
        assert main(["report", str(out), "--html", str(page)]) == 0
        assert H200.name in page.read_text()


def test_what_ran_out_of_memory_is_given_back_before_the_next_one_runs(gpu, tiny, monkeypatch, tmp_path):
    held: list[weakref.ref] = []

    def greedy(problem: Problem) -> Run:
        def run():
            buffer = torch.empty(1000, device=problem.hidden.device)
            held.append(weakref.ref(buffer))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        return run

    def hoarding(problem: Problem) -> Run:
        """Keeps in the closure what it could still allocate."""
        buffer = torch.empty(1000, device=problem.hidden.device)
        held.append(weakref.ref(buffer))

        def run():
            raise torch.OutOfMemoryError(f"CUDA out of memory, on top of {buffer.nbytes}")

        return run

    def next_one(problem: Problem) -> Run:
        assert [reference() for reference in held] == [None, None]
        assert gpu.emptied >= 2
        return choose(all_peers(), ["torch full"])[0].prepare(problem)

    found = [Peer("greedy", greedy), Peer("hoarding", hoarding), Peer("next", next_one)]
    monkeypatch.setattr(head, "all_peers", lambda: found)
    monkeypatch.setattr(head, "cells", lambda *grid: cells(*grid)[:1])
    out = tmp_path / "head.json"

    main(["head", "--repeats", "1", "--json", str(out)])

    results = json.loads(out.read_text())["cells"][0]["results"]
    assert [result["state"] for result in results] == ["out of memory", "out of memory", "ok"]


def test_who_is_not_ready_in_time_is_left_out_and_the_others_are_measured(gpu, tiny, monkeypatch, tmp_path):
    def slow(problem: Problem) -> Run:
        time.sleep(30)
        raise AssertionError

    monkeypatch.setattr(cell, "FIRST_CALLS", 0.2)
    monkeypatch.setattr(head, "all_peers", lambda: [Peer("slow", slow), *choose(all_peers(), ["torch full"])])
    monkeypatch.setattr(head, "cells", lambda *grid: cells(*grid)[:2])
    out = tmp_path / "head.json"

    main(["head", "--repeats", "1", "--json", str(out)])

    first, second = json.loads(out.read_text())["cells"]
    states = {result["name"]: (result["state"], result["reason"]) for result in first["results"]}
    assert states == {"slow": ("no time left", "took more than 0 s"), "torch full logits": ("ok", "")}
    assert [result["name"] for result in second["results"]] == ["torch full logits"]


def test_every_kernel_has_its_time(gpu, tiny, tmp_path):
    out = tmp_path / "kernels.json"

    assert main(["kernels", "--repeats", "1", "--json", str(out)]) == 0

    found = json.loads(out.read_text())["cells"]
    assert {one["reason"] for one in found if one["status"] == "skipped"} == {
        "csrc/ was not built: install with nvcc on the path"
    }
    assert [one["reason"] for one in found if one["status"] == "failed"] == []
    assert all(one["time"] for one in found if one["status"] == "ok")


def test_the_tuner_measures_checks_and_writes_a_table(gpu, monkeypatch, tmp_path):
    shape = tune.Shape(3072, 16, 130, True)
    change = {tune.FORWARD: ({"group": 8},), tune.PAIRS: ({"pair_rows": 64},)}
    for name, value in {"SHAPES": (shape,), "TOKENS": 4, "ROUNDS": 1, "CANDIDATES": change}.items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(tune, "WORST_GRADIENT", 0.05)  # four rows average nothing out
    monkeypatch.setattr(tune, "compile_all", lambda _, sizes, processes: ((key, {}) for key in sizes))
    out, log = tmp_path / "sm_90.json", tmp_path / "log.json"

    assert tune.main(["--out", str(out), "--log", str(log)]) == 0

    assert tuning.read_table(out).provenance["device"] == H200.name
    (tried,) = (entry["tried"] for entry in json.loads(log.read_text())["shapes"])
    assert [entry["fault"] for entry in tried] == [None, None]


def test_the_profiler_lists_kernels_and_what_is_left(gpu, monkeypatch, tmp_path):
    sizes = {"TOKENS": 4, "REPEATS": 1, "SAMPLES": 1, "SHAPES": ((16, 130, False, 0.0),)}
    # Every operation of the interpreter would be an event.
    monkeypatch.setattr(
        profile_head, "step", lambda problem, _: choose(all_peers(), ["full"])[0].prepare(problem)
    )
    for name, value in sizes.items():
        monkeypatch.setattr(profile_head, name, value)
    out = tmp_path / "profile.json"

    assert profile_head.main(["--json", str(out)]) == 0

    (found,) = json.loads(out.read_text())
    assert found["multiple"] == found["step_ms"] / found["product_ms"] > 0
    assert found["idle_ms"] <= found["step_ms"]


def test_the_stages_of_the_sparse_backward_have_their_time(gpu, capsys):
    sparse.main(["--rows=4", "--vocabulary=130", "--depth=16", "--repeats=1", "--variants", "shipped"])

    assert f"on {H200.name}" in capsys.readouterr().out


def test_the_machine_is_described_with_its_ceilings(gpu):
    found = machine.machine()

    assert found["benchmark_device"] == H200.name
    assert min(found["bf16_product_tflops"], found["copy_gigabytes_per_second"]) > 0


def test_the_memory_model_is_held_against_the_allocator(gpu):
    setting = Setting("peaked", 4, 16, 130, "forward_backward", True, "bfloat16")

    found = scaling.check_memory_model(setting, {}, torch.device("cuda"), seed=0)

    assert (found.status, found.metrics["counted_bytes"]) == ("ok", 2 << 20)


@pytest.mark.parametrize("command", ["smoke", "crossover"])
def test_a_command_runs_to_its_end(gpu, tiny, tmp_path, command):
    out = tmp_path / f"{command}.json"
    options = {"smoke": ["--minutes", "30"], "crossover": of_tiny("--factors", "9")}

    assert main([command, *options[command], "--json", str(out)]) == 0

    found = json.loads(out.read_text())["cells"]
    assert {one["status"] for one in found} == {"ok"}, found
