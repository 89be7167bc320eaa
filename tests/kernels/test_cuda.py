"""The CUDA C++ kernel as nvcc compiles it, emulated on the CPU, or run where it is built."""

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
from torch import Tensor

from tests.emulator.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "count_pairs.cu"


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`csrc/` as nvcc compiles it for an architecture."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    output = tmp_path_factory.mktemp("csrc") / "kernel.ptx"
    options = re.findall(r'"(-(?:std|O|ftz)[^"]*)"', (ROOT / "setup.py").read_text())
    architecture = random.choice(["sm_80", "sm_89", "sm_90"])
    subprocess.run([compiler, *options, f"-arch={architecture}", "-ptx", SOURCE, "-o", output], check=True)
    return output.read_text()


def count_pairs_in(ptx: str, call: Any, stream: object) -> None:
    """Count as the library does, in the emulator: each array of `CountPairs` is as long as its sizes say."""
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
    """The library's check runs here too, whichever device it asks for."""
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
    """Where `csrc/` was built for the GPU."""
    if not cuda.LIBRARY.is_file():
        pytest.skip("csrc/ was not built: python setup.py build_ext --inplace")
    return device


@pytest.fixture(params=["emulated", pytest.param("built", marks=pytest.mark.gpu)])
def on(request) -> torch.device:
    """Where the kernel is emulated, and where it is built."""
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


CAUSES = {
    "it agrees": None,
    "a count is wrong": "the pairs of quarter octaves [7]",
    "not a library": "OSError: ",
    "other sources": "AttributeError: ",
    "no launch": "RuntimeError: no kernel image",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_library_is_used_where_it_agrees_with_triton_else_it_warns(on, monkeypatch, tmp_path, cause):
    exact, broken = cuda.count_pairs, tmp_path / "libgrpo_fast.so"
    broken.touch()

    def wrong(*given: object) -> Tensor:
        found = exact(*given)
        found[0, 7] += 1
        return found

    if cause == "a count is wrong":
        monkeypatch.setattr(cuda, "count_pairs", wrong)
    elif cause == "not a library":
        monkeypatch.setattr(cuda, "LIBRARY", broken)
    elif cause == "other sources":
        monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: object())
    elif cause == "no launch":
        monkeypatch.setattr(cuda, "_load", lambda: lambda call, stream: b"no kernel image")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        answers = [cuda.usable(torch.device("cuda", 0), select.count_pairs) for _ in range(2)]

    fault, told = CAUSES[cause], [str(w.message) for w in said if w.category is UserWarning]
    assert answers == [fault is None] * 2 and len(told) == (fault is not None)
    assert all(f"on cuda:0: {fault}" in message for message in told)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("cause", ["nothing built", "no CUDA device", "a graph is captured"])
def test_nothing_is_checked_and_triton_used_where(monkeypatch, tmp_path, cause):
    monkeypatch.setattr(cuda, "disagreement", lambda *_: pytest.fail("checked"))
    if cause == "nothing built":
        monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libgrpo_fast.so")
    if cause == "a graph is captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    device = torch.device("cpu") if cause == "no CUDA device" else torch.device("cuda", 0)
    assert not cuda.usable(device, select.count_pairs)


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
