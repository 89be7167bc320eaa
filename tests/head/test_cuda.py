"""The CUDA C++ kernels' arithmetic, emulated thread by thread on the CPU, and their torch operators."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from grpo_fast import linear_logprob
from grpo_fast.head import cuda, tuning
from grpo_fast.head.plan import Device

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ("interface.cu", "hidden_gradient.cu", "mass_curve.cu")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`csrc/` compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of csrc/ needs g++")
    library = tmp_path_factory.mktemp("csrc") / "libgrpo_fast.so"
    command = [compiler, "-std=c++20", "-O1", "-x", "c++", "-shared", "-fPIC", "-pthread", *SOURCES]
    done = subprocess.run([*command, "-o", library], cwd=CSRC, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return cuda.load(library)


@pytest.fixture
def built() -> None:
    """Where `csrc/` was built for the GPU."""
    if not cuda.available():
        pytest.skip("csrc/ was not built: python setup.py build_ext --inplace")


@pytest.fixture(params=["emulated", pytest.param("built", marks=pytest.mark.gpu)])
def call(request):
    """`call(function, operator, *arguments)` where the kernels are emulated, and where they are built."""
    library = request.getfixturevalue(request.param)
    if library is not None:
        return lambda function, operator, *given: function(library, *given)
    device = request.getfixturevalue("device")

    def run(function, operator, *given):
        return operator(*(t.to(device) if isinstance(t, Tensor) else t for t in given)).cpu()

    return run


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
    targets = torch.full((rows,), -1)
    for row, count in enumerate(counts):
        if count:
            targets[row] = columns[starts[row] + count // 2]
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
        scale = entries.row_scale[row]
        probability = values.abs() / scale if scale else torch.zeros_like(values)
        keep = ~(probability < entries.log_threshold[row].exp()) | (columns == entries.targets[row])
        gradient[row].index_add_(0, columns[keep], values[keep].double())
    return gradient


def check_hidden_gradient(found: Tensor, weight: Tensor, entries: Entries) -> None:
    gradient = dense(entries, weight.shape[0])
    expected = gradient @ weight.double()
    summed = 300 * 2**-23 * (gradient.abs() @ weight.double().abs())
    rounded = expected.abs() * torch.finfo(weight.dtype).eps / 2 + 2**-24
    assert ((found.double() - expected).abs() <= rounded + 2 * summed).all()
    assert found.dtype == weight.dtype and found.shape == expected.shape


SHAPES = [(8, 64), (96, 64), (2048, 40), (2056, 40), (4104, 24), (8200, 24), (37, 64), (2101, 24)]
"""(H, V): one warp; several; one, two and four vectors a thread; two slices; rows not on 16 bytes."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "vocabulary"), SHAPES)
def test_the_hidden_gradient_is_the_sparse_product_in_float32_rounded_once(
    call, rng, dtype, depth, vocabulary
):
    weight = torch.randn(vocabulary, depth + 8 * (depth % 8 == 0), generator=rng).to(dtype)[:, :depth]
    entries = make_entries(rng, [40, 0, 1, 300], vocabulary)

    found = call(cuda.hidden_gradient, cuda.sparse_hidden_gradient, weight, *entries)

    check_hidden_gradient(found, weight, entries)


def test_nan_reaches_its_own_row_and_no_other(emulated, rng):
    weight = torch.randn(64, 48, generator=rng).bfloat16()
    entries = make_entries(rng, [20, 20], 64)
    entries.values[entries.starts[1] + 3] = torch.nan

    found = cuda.hidden_gradient(emulated, weight, *entries)

    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("cause", ["pairs", "entries"])
def test_nothing_is_written_when_lists_overflowed(emulated, rng, monkeypatch, cause):
    entries = make_entries(rng, [20, 20], 64)
    (entries.overflow if cause == "pairs" else entries.used).add_(10)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.full(size, 7.0, dtype=dtype))

    found = cuda.hidden_gradient(emulated, torch.zeros(64, 48).bfloat16(), *entries)

    assert (found == 7).all()


class Masses(NamedTuple):
    """Arguments of the mass curve."""

    tile_lse: Tensor
    logsumexp: Tensor
    targets: Tensor
    working: Tensor
    levels: Tensor
    vocabulary: int
    tile_columns: int = 128


def make_masses(rng: torch.Generator, rows: int, vocabulary: int) -> Masses:
    tiles = -(-vocabulary // 128)
    levels = torch.tensor([-(4 + 0.5 * level) for level in range(47)] + [-torch.inf]) * 0.6931471805599453
    # Masses from far above to far below all levels; some on a level, some zero, one row of NaN.
    log_mass = -30 * torch.rand(tiles, rows, generator=rng)
    log_mass[0], log_mass[tiles // 2, ::2] = levels[5], -torch.inf
    log_mass[:, rows // 2] = torch.nan
    targets = torch.randint(-1, vocabulary + 2, (rows,), generator=rng)
    return Masses(
        log_mass, torch.zeros(rows), targets, torch.rand(rows, generator=rng) < 0.8, levels, vocabulary
    )


def check_mass_curve(found: Tensor, given: Masses) -> None:
    tiles, log_mass = len(given.tile_lse), given.tile_lse
    tile_of_target = torch.where(given.targets < given.vocabulary, given.targets // given.tile_columns, -1)
    counted = (torch.arange(tiles)[:, None] != tile_of_target) & given.working
    mass = torch.where(counted & ~log_mass.isnan(), log_mass.double().exp(), 0.0)
    expected = torch.stack([torch.where(log_mass < level, mass, 0.0).sum(0) for level in given.levels])
    torch.testing.assert_close(found.double(), expected, rtol=(tiles + 8) * 2**-23, atol=1e-30)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 128), (33, 900), (70, 20_000)])
def test_the_mass_curve_sums_the_tiles_below_each_level(call, rng, rows, vocabulary):
    given = make_masses(rng, rows, vocabulary)

    found = call(cuda.mass_curve, cuda.tile_mass_curve, *given)

    check_mass_curve(found, given)


@pytest.mark.parametrize("structure", [cuda.HiddenGradientCall, cuda.MassCurveCall])
def test_the_structures_mirror_the_header(structure):
    header = (CSRC / "grpo_fast.h").read_text()
    name = {"HiddenGradientCall": "hidden_gradient", "MassCurveCall": "mass_curve"}[structure.__name__]
    (body,) = re.findall(r"typedef struct \{([^{}]*)\} grpo_fast_" + name + "_call;", header)
    kinds = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}

    fields = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)

    assert structure._fields_ == [
        (field, ctypes.c_void_p if pointer else kinds[kind]) for kind, pointer, field in fields
    ]
    assert f"GRPO_FAST_INTERFACE = {cuda.INTERFACE} " in header


@pytest.fixture
def on_cpu(emulated) -> None:
    """The operators, emulated for tensors on the CPU."""
    for operator, function in (
        (cuda.sparse_hidden_gradient, cuda.hidden_gradient),
        (cuda.tile_mass_curve, cuda.mass_curve),
    ):
        operator.register_kernel("cpu")(lambda *given, of=function: of(emulated, *given))


def test_the_head_has_the_same_gradient_by_csrc_as_by_triton(on_cpu, device, rng, monkeypatch):
    if device.type != "cpu":
        pytest.skip("interpreted; on a GPU the tuner compares them")
    capability, shared_memory = (8, 0), tuning.SHARED_MEMORY[80]
    sizes = tuning.sizes_for(capability, torch.bfloat16, 64, True)
    weight = torch.randn(700, 64, generator=rng).bfloat16() / 8
    targets = torch.randint(0, 700, (20,), generator=rng)
    hidden = (2 * torch.randn(20, 64, generator=rng) + 20 * weight[targets]).bfloat16().requires_grad_()
    upstream = torch.randn(20, generator=rng)
    facts = Device("cuda", capability, shared_memory, has_triton=True, has_library=True)
    monkeypatch.setattr("grpo_fast.head.operator.device_facts", lambda *_: facts)

    def gradient(**by: bool) -> Tensor:
        chosen = replace(sizes, sparse=replace(sizes.sparse, **by))
        monkeypatch.setattr("grpo_fast.head.plan.sizes_for", lambda *_: chosen)
        logprob = linear_logprob(hidden, weight, targets, tolerance=1.0).logprob
        return torch.autograd.grad((logprob * upstream).sum(), hidden)[0].float()

    by_triton, by_csrc = gradient(), gradient(cuda_rows=True, cuda_curve=True)

    assert by_triton.norm() > 0
    assert (by_triton - by_csrc).norm() <= 2**-7 * by_triton.norm()


def test_the_operators_pass_torchs_own_checks(on_cpu, emulated, rng):
    entries = make_entries(rng, [20, 3], 64)
    weight = torch.randn(64, 48, generator=rng).bfloat16()
    curve = (torch.zeros(2, 4), torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.ones(4) > 0)
    levels = torch.tensor([-3.0, -4.0, -5.0, -torch.inf])
    cases = [
        (cuda.sparse_hidden_gradient, cuda.hidden_gradient, (weight, *entries)),
        (cuda.tile_mass_curve, cuda.mass_curve, (*curve, levels, 200, 128)),
    ]
    for operator, function, arguments in cases:
        torch.library.opcheck(operator, arguments)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
        assert fake.shape == function(emulated, *arguments).shape


def test_a_missing_library_and_one_of_other_sources_say_what_to_do(emulated, tmp_path, monkeypatch):
    with pytest.raises(ImportError, match="was not built: install again where nvcc"):
        cuda.load(tmp_path / "libgrpo_fast.so")
    cuda_interface = cuda.INTERFACE
    monkeypatch.setattr(cuda, "INTERFACE", 99)
    with pytest.raises(ImportError, match=f"interface {cuda_interface}, this is 99"):
        cuda.load.__wrapped__(Path(emulated._name))
    (tmp_path / "libgrpo_fast.so").write_text("not a library")
    with pytest.raises(ImportError, match="cannot be loaded"):
        cuda.load(tmp_path / "libgrpo_fast.so")


@pytest.fixture
def asked_afresh():
    cuda.usable.cache_clear()
    yield
    cuda.usable.cache_clear()


@pytest.mark.usefixtures("asked_afresh")
def test_a_library_that_does_not_run_on_the_device_is_not_used_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libgrpo_fast.so")
    assert not cuda.usable(0)
    (tmp_path / "libgrpo_fast.so").write_text("not a library")
    old_driver = SimpleNamespace(
        grpo_fast_usable=lambda index: 35, grpo_fast_message=lambda error: b"old driver"
    )

    with pytest.warns(UserWarning, match=r"Triton stands in .* on cuda:1\. .* cannot be loaded"):
        monkeypatch.setattr(cuda, "load", partial(cuda.load.__wrapped__, tmp_path / "libgrpo_fast.so"))
        assert not cuda.usable(1)
    with pytest.warns(UserWarning, match=r"on cuda:2\. CUDA library: old driver \(35\)"):
        monkeypatch.setattr(cuda, "load", lambda: old_driver)
        assert not cuda.usable(2)


@pytest.mark.usefixtures("asked_afresh")
def test_a_library_that_runs_on_the_device_is_used(emulated, monkeypatch):
    monkeypatch.setattr(cuda, "LIBRARY", Path(emulated._name))
    monkeypatch.setattr(cuda, "load", lambda: emulated)

    assert cuda.usable(0)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_the_built_library_runs_on_every_gpu_here_and_leaves_the_current_one_as_it_was():
    before = torch.cuda.current_device()

    assert all(cuda.usable(index) for index in range(torch.cuda.device_count()))
    assert torch.cuda.current_device() == before


def test_unsupported_operands_are_named(emulated, rng):
    entries = make_entries(rng, [4], 64)
    with pytest.raises(TypeError, match=r"weight is torch\.float32"):
        cuda.hidden_gradient(emulated, torch.zeros(64, 8), *entries)
    with pytest.raises(TypeError, match=r"values is torch\.float64"):
        wrong = (entries.columns, entries.values.double(), *entries[2:])
        cuda.hidden_gradient(emulated, torch.zeros(64, 8).bfloat16(), *wrong)
    zero = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"levels must number 3 to 48 \(-3\)"):
        cuda.mass_curve(emulated, zero[None], zero, zero.long(), zero > 0, torch.zeros(49), 128, 128)
