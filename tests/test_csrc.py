"""What nvcc makes of `csrc/`, and how the package is built with and without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from grpo_fast.kernels import cuda

ROOT = Path(__file__).resolve().parents[1]
FAKE_NVCC = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
BROKEN_NVCC = "#!/bin/sh\necho no such architecture >&2\nexit 1\n"


def test_the_count_keeps_its_histogram_in_shared_memory_and_a_tile_short(tmp_path):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    pytest.importorskip("triton", reason="its wheel carries cuobjdump")
    from triton.tools.disasm import get_sass

    output = tmp_path / "kernel.cubin"
    options = re.findall(r'"(-(?:std|O|ftz)[^"]*)"', (ROOT / "setup.py").read_text())
    command = [compiler, *options, "-arch=sm_90", "-cubin", ROOT / "csrc" / "count_pairs.cu", "-o", output]
    subprocess.run(command, check=True)

    sass = get_sass(output.read_bytes())
    assert "ATOMS" in sass and not re.search(r"\b(?:ATOMG|RED|STL|LDL)\b", sass)  # STL, LDL: spills
    assert 0 < sass.count(";") < 1500  # twice what 256 tiles need: with an entropy and without


@pytest.fixture
def build(tmp_path: Path):
    """Runs setup.py in a copy of the checkout, with this nvcc and no other."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    for name in ("grpo_fast", "kernels", "csrc", "benchmarks"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "_cuda"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, checkout / name)
    setup = checkout / "setup.py"
    setup.write_text(setup.read_text().replace("/usr/local/cuda", str(tools / "none")))
    (tools / "bin").mkdir(parents=True)

    def build(nvcc: str | None, wanted: str | None, *command: str) -> tuple[int, str, Path]:
        if nvcc is not None:
            (tools / "bin" / "nvcc").write_text(nvcc)
            (tools / "bin" / "nvcc").chmod(0o755)
        environment = os.environ | {"PATH": f"{tools / 'bin'}:/usr/bin:/bin", "CUDA_HOME": str(tools)}
        for name in ("CUDA_PATH", "GRPO_FAST_CUDA"):
            environment.pop(name, None)
        if wanted is not None:
            environment["GRPO_FAST_CUDA"] = wanted
        run = [sys.executable, "setup.py", *command]
        done = subprocess.run(run, cwd=checkout, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, checkout

    return build


@pytest.mark.parametrize(("nvcc", "holds"), [(FAKE_NVCC, True), (None, False)], ids=["nvcc", "no nvcc"])
def test_a_wheel_holds_the_library_where_there_is_nvcc_else_it_is_pure(build, nvcc, holds):
    error, said, checkout = build(nvcc, None, "-q", "bdist_wheel")

    assert not error, said
    (wheel,) = (checkout / "dist").glob("*.whl")
    tags = wheel.stem.split("-", 2)[2]
    assert tags.startswith("py3-none-") and tags.endswith("-any") != holds
    assert ("grpo_fast/_cuda/libgrpo_fast.so" in zipfile.ZipFile(wheel).namelist()) == holds


@pytest.mark.parametrize(
    ("nvcc", "wanted", "built", "error"),
    [
        (FAKE_NVCC, "1", True, None),
        (FAKE_NVCC, "0", False, None),
        (BROKEN_NVCC, None, False, None),
        (BROKEN_NVCC, "1", False, "no such architecture"),
        (None, "1", False, "nvcc is neither on PATH nor in CUDA_HOME"),
        (FAKE_NVCC, "yes", False, "GRPO_FAST_CUDA='yes'"),
    ],
    ids=["built", "not wanted", "broken", "broken and wanted", "no nvcc and wanted", "neither 0 nor 1"],
)
def test_a_checkout_builds_the_library_and_fails_only_where_it_must_have_it(
    build, nvcc, wanted, built, error
):
    failed, said, checkout = build(nvcc, wanted, "build_ext", "--inplace")

    assert bool(failed) == (error is not None) and (error or "") in said, said
    assert (checkout / cuda.LIBRARY.relative_to(ROOT)).is_file() == built
