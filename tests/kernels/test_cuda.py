"""The CUDA C++ kernels' arithmetic, emulated thread by thread on the CPU, or run where they are built."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from grpo_fast.kernels import LEVELS, TILE, cuda
from torch import Tensor

from grpo_fast import linear_logprob
from grpo_fast.head import tuning
from grpo_fast.head.plan import Device

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ("interface.cu", "hidden_gradient.cu", "mass_curve.cu")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`csrc/` compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of csrc/ needs g++")
    library = tmp_path_factory.mktemp("csrc") / "libgrpo_fast.so"
    command = [compiler, "-std=c++20", "-O1", "-x", "c++", "-shared", "-fPIC", "-pthread", *SOURCES]
    done = subprocess.run([*command, "-o", library], cwd=CSRC, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture
def at(monkeypatch):
    """Looks for the library at a path."""

    def at(path: Path) -> None:
        monkeypatch.setattr(cuda, "LIBRARY", path)
        cuda.load.cache_clear()

    yield at
    cuda.load.cache_clear()


@pytest.fixture
def emulated(at, compiled) -> torch.device:
    at(compiled)
    return torch.device("cpu")


@pytest.fixture
def built(device) -> torch.device:
    """Where `csrc/` was built for the GPU."""
    if not cuda.available():
        pytest.skip("csrc/ was not built: python setup.py build_ext --inplace")
    return device


@pytest.fixture(params=["emulated", pytest.param("built", marks=pytest.mark.gpu)])
def on(request) -> torch.device:
    """Where the kernels are emulated, and where they are built."""
    return request.getfixturevalue(request.param)


class Entries(NamedTuple):
    """Arguments of the hidden gradient after the weight: `cuda.ENTRIES`."""

    columns: Tensor
    values: Tensor
    starts: Tensor
    counts: Tensor
    targets: Tensor
    row_scale: Tensor
    log_threshold: Tensor
    used: Tensor
    overflow: Tensor


def make_entries(rng: torch.Generator, counts: list[int], vocabulary: int) -> Entries:
    """Rows in shuffled order; about half the entries below their row's threshold; targets among them."""
    total, rows = sum(counts), len(counts)
    sizes = torch.tensor(counts)
    order = torch.randperm(rows, generator=rng)
    starts = torch.empty(rows, dtype=torch.int64)
    starts[order] = sizes[order].cumsum(0) - sizes[order]
    columns = torch.randint(0, vocabulary, (total + 5,), generator=rng, dtype=torch.int32)
    values = torch.randn(total + 5, generator=rng)
    targets = torch.where(sizes > 0, columns[starts + sizes // 2], -1).long()
    scale = torch.rand(rows, generator=rng) + 0.5
    return Entries(
        columns, values, starts, sizes.int(), targets, scale, torch.log(0.7 / scale),
        torch.tensor([total, total]), torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


def dense(entries: Entries, vocabulary: int) -> Tensor:
    """(N, V) float64: the entries that count."""
    rows = len(entries.counts)
    gradient = torch.zeros(rows, vocabulary, dtype=torch.float64)
    for row in range(rows):
        span = slice(int(entries.starts[row]), int(entries.starts[row] + entries.counts[row]))
        columns, values = entries.columns[span].long(), entries.values[span]
        probability = values.abs() / entries.row_scale[row]
        keep = ~(probability < entries.log_threshold[row].exp()) | (columns == entries.targets[row])
        gradient[row].index_add_(0, columns[keep], values[keep].double())
    return gradient


SHAPES = [(8, 64), (96, 64), (2048, 40), (2056, 40), (4104, 24), (8200, 24), (37, 64), (2101, 24)]
"""(H, V): one warp; several; one, two and four vectors a thread; two slices; rows not on 16 bytes."""


@pytest.mark.parametrize(("place", "shape"), list(enumerate(SHAPES)))
def test_a_hidden_gradient_row_is_the_sparse_product_in_float32_rounded_once(on, rng, place, shape):
    depth, vocabulary = shape
    dtype = (torch.bfloat16, torch.float16)[place % 2]
    weight = torch.randn(vocabulary, depth + 8 * (depth % 8 == 0), generator=rng).to(dtype)[:, :depth]
    entries = make_entries(rng, [40, 0, 1, 300], vocabulary)

    found = cuda.hidden_gradient(weight.to(on), *(t.to(on) for t in entries)).cpu()

    gradient = dense(entries, vocabulary)
    expected = gradient @ weight.double()
    summed = 300 * 2**-23 * (gradient.abs() @ weight.double().abs())
    rounded = expected.abs() * torch.finfo(dtype).eps / 2 + 2**-24
    assert ((found.double() - expected).abs() <= rounded + 2 * summed).all()
    assert found.dtype == dtype and found.shape == expected.shape


def test_nan_reaches_its_own_row_and_no_other(emulated, rng):
    entries = make_entries(rng, [20, 20], 64)
    entries.values[entries.starts[1] + 3] = torch.nan

    found = cuda.hidden_gradient(torch.randn(64, 48, generator=rng).bfloat16(), *entries)

    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("cause", ["overflow", "used"])
def test_nothing_is_written_when_pairs_or_entries_overflowed(emulated, rng, monkeypatch, cause):
    entries = make_entries(rng, [20, 20], 64)
    getattr(entries, cause).add_(10)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.full(size, 7.0, dtype=dtype))

    assert (cuda.hidden_gradient(torch.zeros(64, 48).bfloat16(), *entries) == 7).all()


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 128), (33, 900), (70, 20_000)])
def test_the_mass_curve_sums_a_rows_tiles_below_each_level(on, rng, rows, vocabulary):
    tiles = -(-vocabulary // TILE)
    levels = torch.tensor([-(4 + 0.5 * level) for level in range(47)] + [-torch.inf]) * 0.6931471805599453
    # Masses from far above to far below all levels; some on a level, some zero, one row of NaN.
    log_mass = -30 * torch.rand(tiles, rows, generator=rng)
    log_mass[0], log_mass[tiles // 2, ::2] = levels[5], -torch.inf
    log_mass[:, rows // 2] = torch.nan
    targets = torch.randint(-1, vocabulary + 2, (rows,), generator=rng)
    working = torch.rand(rows, generator=rng) < 0.8
    masses = (log_mass, torch.zeros(rows), targets, working, levels)

    found = cuda.mass_curve(*(t.to(on) for t in masses), vocabulary=vocabulary).cpu()

    tile_of_target = torch.where(targets < vocabulary, targets // TILE, -1)
    counted = (torch.arange(tiles)[:, None] != tile_of_target) & working
    mass = torch.where(counted & ~log_mass.isnan(), log_mass.double().exp(), 0.0)
    expected = torch.stack([torch.where(log_mass < level, mass, 0.0).sum(0) for level in levels])
    torch.testing.assert_close(found.double(), expected, rtol=(tiles + 8) * 2**-23, atol=1e-30)


@pytest.mark.parametrize("name", ["hidden_gradient", "mass_curve"])
def test_the_structures_mirror_the_header(name):
    header = (CSRC / "grpo_fast.h").read_text()
    structure = {"hidden_gradient": cuda.HiddenGradientCall, "mass_curve": cuda.MassCurveCall}[name]
    (body,) = re.findall(r"typedef struct \{([^{}]*)\} grpo_fast_" + name + "_call;", header)
    kinds = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}

    fields = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)

    assert structure._fields_ == [
        (field, ctypes.c_void_p if pointer else kinds[kind]) for kind, pointer, field in fields
    ]
    assert f"GRPO_FAST_INTERFACE = {cuda.INTERFACE} " in header


def test_the_head_has_the_same_gradient_by_csrc_as_by_triton(emulated, device, rng, monkeypatch):
    if device.type != "cpu":
        pytest.skip("interpreted; on a GPU the tuner compares them")
    sizes = tuning.sizes_for((8, 0), torch.bfloat16, 64, True)
    weight = torch.randn(300, 64, generator=rng).bfloat16() / 8
    targets = torch.randint(0, 300, (8,), generator=rng)
    hidden = (2 * torch.randn(8, 64, generator=rng) + 20 * weight[targets]).bfloat16().requires_grad_()
    upstream = torch.randn(8, generator=rng)
    facts = Device("cuda", (8, 0), tuning.SHARED_MEMORY[80], has_triton=True, has_library=True)
    monkeypatch.setattr("grpo_fast.head.operator.device_facts", lambda *_: facts)

    def gradient(**by: bool) -> Tensor:
        chosen = replace(sizes, sparse=replace(sizes.sparse, row_entries=64, **by))
        monkeypatch.setattr("grpo_fast.head.plan.sizes_for", lambda *_: chosen)
        logprob = linear_logprob(hidden, weight, targets, tolerance=1.0).logprob
        return torch.autograd.grad((logprob * upstream).sum(), hidden)[0].float()

    by_triton, by_csrc = gradient(), gradient(cuda_rows=True, cuda_curve=True)

    assert by_triton.norm() > 0
    assert (by_triton - by_csrc).norm() <= 2**-7 * by_triton.norm()


def test_a_library_is_used_where_it_runs_and_else_says_why_not(at, compiled, tmp_path, monkeypatch):
    broken = tmp_path / "libgrpo_fast.so"
    at(broken)
    assert not cuda.usable(0)
    broken.write_text("not a library")
    with pytest.warns(UserWarning, match=r"Triton stands in .* on cuda:1\. .* cannot be loaded"):
        assert not cuda.usable(1)

    at(compiled)
    assert cuda.usable(0)
    old = SimpleNamespace(grpo_fast_usable=lambda index: 35, grpo_fast_message=lambda error: b"old driver")
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"cuda:2\. .*old driver \(35\)"):
        patch.setattr(cuda, "load", lambda: old)
        assert not cuda.usable(2)

    cuda.load.cache_clear()
    monkeypatch.setattr(cuda, "INTERFACE", 99)
    with pytest.raises(ImportError, match="this is 99: install again where nvcc"):
        cuda.load()


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_the_built_library_runs_on_every_gpu_here_and_leaves_the_current_one_as_it_was():
    before = torch.cuda.current_device()

    assert all(cuda.usable(index) for index in range(torch.cuda.device_count()))
    assert torch.cuda.current_device() == before


def test_a_tensor_of_another_dtype_is_named_and_so_is_what_the_library_refuses(emulated, rng):
    entries = make_entries(rng, [4], 64)
    with pytest.raises(TypeError, match=r"values is torch\.float64"):
        cuda.hidden_gradient(torch.zeros(64, 8).bfloat16(), *entries._replace(values=entries.values.double()))
    zero = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"levels must number 3 to 48 \(-3\)"):
        cuda.mass_curve(zero[None], zero, zero.long(), zero > 0, torch.zeros(LEVELS + 1), vocabulary=128)
