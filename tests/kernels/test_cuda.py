"""The CUDA C++ kernel of `csrc/`, compiled by nvcc and emulated on the CPU, or run where it is built."""

from __future__ import annotations

import functools
import random
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_fast.kernels import BINS, TILE, cuda, select
from grpo_fast.kernels.coefficients import RowCoefficients, row_coefficients

from tests.emulator.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "count_pairs.cu"


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    output = tmp_path_factory.mktemp("csrc") / "kernel.ptx"
    options = re.findall(r'"(-(?:std|O|ftz)[^"]*)"', (ROOT / "setup.py").read_text())
    architecture = random.choice(["sm_80", "sm_89", "sm_90"])
    subprocess.run([compiler, *options, f"-arch={architecture}", "-ptx", SOURCE, "-o", output], check=True)
    return output.read_text()


def count_pairs_in(ptx: str, call: Any, stream: object) -> None:
    """Run the library's function in the emulator; `call` holds the fields of `CountPairs`."""
    stride, _, rows, tiles, parts, blocks = call[10:]
    floats = [(rows - 1) * stride + tiles, rows, 2 * rows, *5 * [rows], 2 * parts, blocks * BINS]
    spans = [(address, 4 * count) for address, count in zip(call, floats, strict=False) if address]
    Launch(ptx, [bytes(call)], (blocks, 1, 1), spans, warps=8, shared=8 * BINS * 4).run()


@pytest.fixture(autouse=True)
def nothing_loaded_nor_asked_before(monkeypatch):
    for name in ("_load", "usable"):
        monkeypatch.setattr(cuda, name, functools.cache(getattr(cuda, name).__wrapped__))


@pytest.fixture
def emulated(monkeypatch, ptx, device) -> torch.device:
    """Emulate the library on the CPU, for any device."""
    if device.type != "cpu":
        pytest.skip("the emulation is compared with kernels on a CPU: set TRITON_INTERPRET=1")
    (name,) = {*re.findall(r"grpo_fast_count_pairs\w+", SOURCE.read_text())}
    library, load = SimpleNamespace(**{name: functools.partial(count_pairs_in, ptx)}), cuda.ctypes.CDLL
    monkeypatch.setattr(cuda, "LIBRARY", SOURCE)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: library if path == str(SOURCE) else load(path))
    check = cuda.disagreement
    monkeypatch.setattr(cuda, "disagreement", lambda _, by_triton: check(torch.device("cpu"), by_triton))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cpu")


@pytest.fixture
def built(device) -> torch.device:
    if not cuda.LIBRARY.is_file():
        pytest.skip("csrc/ was not built: python setup.py build_ext --inplace")
    return device


@pytest.fixture(params=["emulated", pytest.param("built", marks=pytest.mark.gpu)])
def on(request) -> torch.device:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 128), (9, 900), (33, 40_000)])
@pytest.mark.parametrize("of_entropy", [False, True])
def test_the_counts_are_those_of_triton(on, rng, rows, vocabulary, of_entropy):
    tiles = -(-vocabulary // TILE)
    logsumexp = 40 * torch.rand(rows, generator=rng) - 20
    tile_lse = (logsumexp[:, None] - 30 * torch.rand(rows, tiles + 13, generator=rng))[:, :tiles]
    tile_lse[::2, tiles // 2] = -torch.inf
    tile_lse[3::5] = torch.nan
    targets = torch.randint(0, vocabulary, (rows,), generator=rng)
    targets[1::4], targets[2::4] = -1, vocabulary  # in the first and the last tile, if it were a target
    gradients = torch.tensor([1.0, 0.0, torch.nan, 0.0, 0.0, 0.0, -1.0]).repeat(rows)
    entropy = torch.rand(rows, generator=rng) if of_entropy else None
    squares = torch.rand(3, generator=rng, dtype=torch.float64)
    of_rows = logsumexp, gradients[:rows], gradients[3 : rows + 3], torch.rand(rows, generator=rng)
    given = [t if t is None else t.to(on) for t in (*of_rows, entropy, entropy, squares, squares.long())]
    coefficients = RowCoefficients(*given)
    masses = select.Masses.of(tile_lse.to(on), targets.to(on), coefficients, vocabulary)

    counts = (cuda.count_pairs, select.count_pairs)
    found, expected = (count(masses, coefficients.squares).sum(0).cpu() for count in counts)

    assert found.sum() == expected.sum() and (found.sum() > 0 or rows == 1)
    assert (found - expected).abs().sum() <= 2 + 1e-3 * found.sum()  # some lie where rounding decides


def broken(cause: str, exact: Any) -> tuple[Any, str, Any]:
    """Return what replaces an attribute of `cuda`, as (object, name, value), to break the library."""
    if cause == "OSError: ":
        return cuda, "LIBRARY", ROOT / "setup.py"  # not a library
    if cause == "AttributeError: ":
        return cuda.ctypes, "CDLL", lambda path: object()  # built from other sources
    if cause.startswith("RuntimeError"):
        return cuda, "_load", lambda: lambda call, stream: b"no kernel image"
    bin_7 = (torch.arange(BINS) == 7).int()
    return cuda, "count_pairs", lambda *given: exact(*given) + bin_7.to(given[1].device)


@pytest.mark.parametrize(
    "fault",
    [
        "",
        "the pairs of quarter octaves [7]",
        "OSError: ",
        "AttributeError: ",
        "RuntimeError: no kernel image",
    ],
)
def test_the_library_is_used_if_it_agrees_with_triton_else_one_warning(on, monkeypatch, fault):
    if fault:
        monkeypatch.setattr(*broken(fault, cuda.count_pairs))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        answers = [cuda.usable(torch.device("cuda", 0), select.count_pairs) for _ in range(2)]

    messages = [str(w.message) for w in caught if w.category is UserWarning]
    assert answers == [not fault] * 2 and len(messages) == bool(fault)
    assert all(f"on cuda:0: {fault}" in message for message in messages)


@pytest.mark.usefixtures("emulated")
def test_triton_counts_without_a_library_a_gpu_or_while_a_graph_is_captured(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "disagreement", lambda *_: pytest.fail("checked"))
    gpu = torch.device("cuda", 0)

    assert not cuda.usable(torch.device("cpu"), select.count_pairs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not cuda.usable(gpu, select.count_pairs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libgrpo_fast.so")
    cuda.usable.cache_clear()
    assert not cuda.usable(gpu, select.count_pairs)


@pytest.mark.usefixtures("emulated")
def test_the_same_pairs_are_kept_by_the_library(make_head, monkeypatch):
    head = make_head(24, 60 * TILE, 16, spread=4.0)
    coefficients = row_coefficients(head.call, *head.upstream)
    expected = select.select_live(head.call, coefficients, head.tile_lse, tolerance=4.0)
    monkeypatch.setattr(cuda, "usable", lambda *_: True)
    monkeypatch.setattr(select, "count_pairs", None)

    live = select.select_live(head.call, coefficients, head.tile_lse, tolerance=4.0)

    torch.testing.assert_close(live.threshold.numbers, expected.threshold.numbers, rtol=0.02, atol=0.02)
    assert 0 < live.count.sum() < live.masses.tile_lse.numel()


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_the_built_library_is_used_on_every_gpu_here():
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            assert cuda.usable(torch.device("cuda", index), select.count_pairs)
