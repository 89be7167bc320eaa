"""The CUDA C++ kernel's arithmetic, emulated thread by thread on the CPU, or run where it is built."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING, LEVELS, PAIR_SHARE, TILE, cuda, select
from grpo_fast.kernels.coefficients import row_coefficients
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`csrc/` compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of csrc/ needs g++")
    library = tmp_path_factory.mktemp("csrc") / "libgrpo_fast.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", TESTS / "csrc_emulated.cpp"]
    done = subprocess.run([*command, "-o", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(autouse=True)
def nothing_loaded_nor_asked_before(monkeypatch):
    for name in ("_load", "usable"):
        monkeypatch.setattr(cuda, name, functools.cache(getattr(cuda, name).__wrapped__))


@pytest.fixture
def emulated(monkeypatch, compiled) -> torch.device:
    """The library's check runs here too, whichever device it asks for."""
    monkeypatch.setattr(cuda, "LIBRARY", compiled)
    check = cuda.disagreement
    monkeypatch.setattr(cuda, "disagreement", lambda device: check(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cpu")


@pytest.fixture
def built(device) -> torch.device:
    """Where `csrc/` was built for the GPU."""
    if not cuda.LIBRARY.is_file():
        pytest.skip("csrc/ was not built: python setup.py build_ext --inplace")
    return device


@pytest.fixture(params=["emulated", pytest.param("built", marks=pytest.mark.gpu)])
def on(request) -> torch.device:
    """Where the kernel is emulated, and where it is built."""
    return request.getfixturevalue(request.param)


def exact_curve(tile_lse: Tensor, logsumexp: Tensor, counted: Tensor) -> Tensor:
    """(N, LEVELS) float64: the masses that are counted, (N, T), summed below each level."""
    log2_mass = (tile_lse - logsumexp[:, None]) * 1.44269504  # rounded as in the kernel: some lie on a level
    levels = -(4 + torch.arange(LEVELS) / 2)
    levels[-1] = -torch.inf
    below = (log2_mass[..., None] < levels) & counted[..., None]
    return torch.where(below, log2_mass.double().exp2()[..., None], 0.0).sum(1)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 128), (9, 900), (33, 40_000)])
def test_a_rows_curve_is_the_mass_of_its_tiles_below_each_level(on, rng, rows, vocabulary):
    tiles = -(-vocabulary // TILE)
    logsumexp = 40 * torch.rand(rows, generator=rng) - 20
    tile_lse = logsumexp[:, None] - 30 * torch.rand(rows, tiles + 13, generator=rng)
    tile_lse = tile_lse[:, :tiles]  # what lies between rows would count
    tile_lse[::2, tiles // 2] = -torch.inf
    tile_lse[3::5] = torch.nan
    on_levels = min(tiles, LEVELS)
    logsumexp[0], tile_lse[0, :on_levels] = 0, -(4 + torch.arange(on_levels) / 2) * math.log(2)
    targets = torch.randint(0, vocabulary, (rows,), generator=rng)
    targets[1::4], targets[2::4] = -1, vocabulary  # in the first and the last tile, if it were a target
    gradients = torch.tensor([1.0, 0.0, torch.nan, 0.0, 0.0, 0.0, -1.0])
    target_gradient, mass_gradient = gradients.repeat(rows)[:rows], gradients.repeat(rows)[3 : rows + 3]
    works = (target_gradient != 0) | (mass_gradient != 0)

    inputs = tile_lse, logsumexp, targets, target_gradient, mass_gradient
    found = cuda.mass_curve(*(t.to(on) for t in inputs), vocabulary=vocabulary).cpu()

    tile_of_target = torch.where(targets < vocabulary, targets // TILE, -1)
    counted = (torch.arange(tiles) != tile_of_target[:, None]) & works[:, None]
    expected = exact_curve(tile_lse, logsumexp, counted)
    torch.testing.assert_close(found.double(), expected, rtol=(tiles + 8) * 2**-23, atol=1e-30)
    assert not found[:, -1].any()


@pytest.mark.parametrize("wrong_row", [None, 2])
def test_the_library_is_used_where_it_agrees_with_triton_and_else_triton_with_a_warning(
    on, monkeypatch, wrong_row
):
    exact = cuda.mass_curve

    def curve(*inputs: Tensor, vocabulary: int) -> Tensor:
        found = exact(*inputs, vocabulary=vocabulary)
        if wrong_row is not None:
            found[wrong_row, 9] *= 0.8
        return found

    monkeypatch.setattr(cuda, "mass_curve", curve)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        answers = [cuda.usable(torch.device("cuda", 0)) for _ in range(2)]

    assert answers == [wrong_row is None] * 2
    told = [str(w.message) for w in said if w.category is UserWarning]
    assert len(told) == (wrong_row is not None)
    if told:
        assert "Triton stands in for csrc/ on cuda:0: the masses of rows [2]" in told[0]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("cause", ["not a library", "other sources", "no launch"])
def test_a_library_that_does_not_run_is_not_used_and_the_warning_says_why(monkeypatch, tmp_path, cause):
    if cause == "not a library":
        reason, path = "OSError: .*file too short", tmp_path / "libgrpo_fast.so"
        path.touch()
        monkeypatch.setattr(cuda, "LIBRARY", path)
    elif cause == "other sources":
        reason = "AttributeError: .*grpo_fast_mass_curve"
        monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: object())
    else:
        reason = "RuntimeError: no kernel image"
        monkeypatch.setattr(cuda, "_load", lambda: lambda call, stream: b"no kernel image")

    with pytest.warns(UserWarning, match=rf"on cuda:1: {reason}.* Build it again, .* or remove /.*\.so"):
        assert not cuda.usable(torch.device("cuda", 1))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("cause", ["nothing built", "no CUDA device", "a graph is captured"])
def test_nothing_is_checked_and_triton_used_where(monkeypatch, tmp_path, cause):
    monkeypatch.setattr(cuda, "disagreement", lambda device: pytest.fail("checked"))
    if cause == "nothing built":
        monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libgrpo_fast.so")
    if cause == "a graph is captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    assert not cuda.usable(torch.device("cpu") if cause == "no CUDA device" else torch.device("cuda", 0))


@pytest.mark.usefixtures("emulated")
def test_the_exact_curve_is_used_where_it_can_be_and_spends_no_more_than_the_budget(make_head, monkeypatch):
    head = make_head(24, 60 * TILE, 16, spread=4.0)
    coefficients = row_coefficients(head.problem, *head.upstream)
    monkeypatch.setattr(cuda, "usable", lambda device: True)
    monkeypatch.setattr(select, "counted_curve", None)

    live = select.select_live(head.problem, coefficients, head.tile_lse, tolerance=1.0)

    spent = (coefficients.mass * live.left_out).nan_to_num().double().square().sum()
    budget = (PAIR_SHARE * BF16_ROUNDING) ** 2 * coefficients.squares.double().sum()
    assert live.found[0] > 0
    assert 0.05 * budget < spent <= budget


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_the_built_library_is_used_on_every_gpu_here():
    assert all(cuda.usable(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
