"""Every command of a GPU hour, and a training step, on tensors of the CPU that say they are on an H200.

It guards the first run on a real one: what fails here fails there. The kernels are interpreted, events read
the wall clock, and the allocator's numbers are made up, so that no figure means anything.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_fast.kernels import cuda
from torch.overrides import TorchFunctionMode

from benchmarks import machine, profile_head, smoke, tune
from benchmarks.__main__ import main
from benchmarks.peers.functions import full_logits
from benchmarks.record import Measurement, read
from grpo_fast.head import accelerated, operator, tuning

pytest.importorskip("triton")
N, H, V = 4, 16, 130
FACTS = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150 << 30,
    multi_processor_count=2,
    L2_cache_size=1,
    shared_memory_per_block_optin=232_448,
    uuid="0",
)
ANSWERS = {
    "is_available": True,
    "get_device_properties": FACTS,
    "get_device_name": FACTS.name,
    "get_device_capability": (9, 0),
    "device_count": 1,
    "current_device": 0,
    "synchronize": None,
    "empty_cache": None,
    "mem_get_info": (140 << 30, 141 << 30),
    "memory_allocated": 1 << 20,
    "memory_reserved": 4 << 20,
    "max_memory_allocated": 3 << 20,
    "max_memory_reserved": 4 << 20,
    "reset_peak_memory_stats": None,
    "is_current_stream_capturing": False,
}


class OnCpu(TorchFunctionMode):
    """The CPU in place of CUDA among the arguments, CUDA in place of the CPU when a tensor is asked."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function(*args, **kwargs or {})
        options = {name: self.swapped(value) for name, value in (kwargs or {}).items()}
        operands = tuple(map(self.swapped, args))
        if function == torch.Tensor.device.__get__:
            found = function(*operands)
            return torch.device("cuda", 0) if found.type == "cpu" else found
        if function == torch.Tensor.is_cuda.__get__:
            return True
        options.pop("pin_memory", None)
        if (dtype := options.get("out_dtype")) is not None:  # products of halves in float32: a GPU alone has
            del options["out_dtype"]
            operands = tuple(operand.to(dtype) for operand in operands)
        return function(*operands, **options)

    @staticmethod
    def swapped(value: Any) -> Any:
        return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return function(*args, **kwargs)

    return call


class WallClockEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.is_timed = enable_timing

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: WallClockEvent) -> float:
        assert self.is_timed and later.is_timed
        return 1e3 * (later.at - self.at)


class Stream:
    device = "cuda"

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any = None) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self) -> WallClockEvent:
        return WallClockEvent()


class Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """And shapes so small that the interpreter is done in seconds."""
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("a GPU is there: the benchmarks themselves run on it")
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "Event", WallClockEvent)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(
        torch.accelerator, "is_available", lambda *_: False
    )  # a CUDA build would ask the driver
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the mode below is of this thread
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "not-built.so")  # no fake runs compiled code
    for name, size in (("_COPY_BYTES", 1 << 16), ("_SIDE", 64)):
        monkeypatch.setitem(getattr(machine, name), "cuda", size)
    monkeypatch.setitem(smoke._SIZES, "cuda", (("histogram", N, H, V),))
    operator.device_facts.cache_clear()
    # Of an operator that torch calls, and of a backward, no mode sees the inside.
    for module, inside in ((operator, ("_plan_forward", "_plan")), (accelerated, ("forward", "backward"))):
        for name in inside:
            monkeypatch.setattr(module, name, on_cpu(getattr(module, name)))
    with OnCpu():
        yield
    operator.device_facts.cache_clear()


SIZES = ["--tokens", str(N), "--hidden", str(H), "--vocab", str(V)]
FEW = ["--tokens", "2", "--hidden", str(H), "--vocab", "20"]


def run(tmp_path: Path, command: str, *options: str) -> list[Measurement]:
    out = tmp_path / f"{command}.json"
    assert main([command, *options, "--repeats", "1", "--minutes", "30", "--json", str(out)]) == 0
    record = read(out)
    assert record.environment["benchmark_device"].endswith(FACTS.name)
    found = {cell.status: cell.reason for cell in record.cells}
    assert "ok" in found and set(found) <= {"ok", "skipped"}, found
    return record.cells


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("smoke", ["--impl", "kept"]),
        ("crossover", [*SIZES, "--factors", "9", "--impl", "kept"]),
        ("scaling", [*FEW, "--at-tokens", "2", "--at-vocab", "20", "--impl", "kept"]),
    ],
)
def test_a_command_runs_to_its_end(gpu, tmp_path, command, options):
    run(tmp_path, command, *options)


def test_the_head_is_measured_on_rows_of_the_model_in_half_precision(gpu, tmp_path):
    one = ["--mode", "forward_backward", "--trainable", "--loss", "logprob", "--rows", "histogram"]
    _, *cells = run(tmp_path, "head", *SIZES, *one, "--impl", "ours, tolerance 0", "torch full")

    assert {(cell.shape["rows"], cell.shape["dtype"]) for cell in cells} == {("histogram", "bfloat16")}
    assert {cell.memory.allocator for cell in cells if cell.time} == {2 << 20}


def test_each_kernel_is_measured_and_its_work_counted(gpu, tmp_path):
    found = {cell.implementation: cell for cell in run(tmp_path, "kernels", *SIZES)}

    skipped = {name for name, cell in found.items() if cell.status == "skipped"}
    assert skipped == {"histogram, CUDA C++"}  # not built
    sparse = found["dX, sparse"].metrics
    assert 0 < sparse["density"] <= 1 and 0 < sparse["entries_per_row"] <= V
    tiles, entries = 2, sparse["entries_per_row"] * N
    for name, flops, moved in (
        ("forward", 2 * N * H * V, 2 * H * (N + V) + 4 * N * tiles),
        ("select", 0, 4 * N * tiles),
        ("dX and dW, dense", 6 * N * H * V, 4 * H * (N + V)),
        ("dX, sparse", 4 * entries * H, 2 * H * (min(entries, V) + 2 * N)),
    ):
        seconds = found[name].time.median / 1e3
        assert found[name].metrics["bytes_per_second"] == pytest.approx(moved / seconds)
        assert found[name].metrics.get("flops_per_second", 0) == pytest.approx(flops / seconds)


def test_the_tuner_measures_checks_and_writes_a_table(gpu, monkeypatch, tmp_path):
    overflowing = {"usual_density": 0.0, "least_pairs": 1}
    changes = {tune.FORWARD: ({"group": 8},), tune.PAIRS: (overflowing,)}
    shape = tune.Shape(3072, H, V, True)
    for name, value in {"SHAPES": (shape,), "TOKENS": N, "ROUNDS": 1, "CANDIDATES": changes}.items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(tune, "WORST_GRADIENT", 0.05)  # four rows average nothing out
    monkeypatch.setattr(tune, "compile_all", lambda _, sizes, processes: {key: [] for key in sizes})
    out, log = tmp_path / "sm_90.json", tmp_path / "log.json"

    assert tune.main(["--out", str(out), "--log", str(log)]) == 0

    assert tuning.read_table(out).provenance["device"] == FACTS.name
    (tried,) = (entry["tried"] for entry in json.loads(log.read_text())["shapes"])
    assert [entry["fault"] for entry in tried] == [None, None]
    assert all(entry["before"] > 0 for entry in tried)


def test_the_profiler_and_the_machine_are_measured(gpu, monkeypatch, tmp_path):
    for name, value in {"TOKENS": N, "REPEATS": 1, "SAMPLES": 1, "SHAPES": ((H, V, False, 0.0),)}.items():
        monkeypatch.setattr(profile_head, name, value)
    # Every operation of the interpreter would be an event.
    monkeypatch.setattr(profile_head, "prepare", lambda problem, _: full_logits(problem))
    out = tmp_path / "profile.json"

    assert profile_head.main(["--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found["multiple"] == found["step_ms"] / found["product_ms"] > 0
    assert machine.machine()["bf16_product_tflops"] > 0


def test_steps_with_everything_away_are_those_of_a_cpu(request, make_trainer: Callable[..., Any]):
    """Kernels, streams, the hand-over, and state that visits the GPU: code that no CPU runs otherwise."""
    plain = {"attention": "sdpa", "compile": False, "liger_kernels": False}  # nothing that torch compiles
    rollout = {"engine": "transformers", "num_generations": 4, "max_completion_length": 4}
    sections = {"loss": {"beta": 0.1}, "model": plain, "rollout": rollout}
    sections |= {"prompts_per_step": 1, "micro_batch_tokens": 1000}
    on_cpu = make_trainer(**sections)
    expected = [on_cpu.train_step().metrics for _ in range(2)]

    request.getfixturevalue("gpu")
    plain["device"] = "cuda"
    trainer = make_trainer(**sections, memory={"offload": ["gradients", "optimizer", "master", "reference"]})
    found = [trainer.train_step().metrics for _ in range(2)]

    assert trainer.handover.away == {"gradients", "optimizer", "master", "reference"}
    for mine, other in zip(found, expected, strict=True):
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
        assert mine["reward/mean"] == other["reward/mean"]
