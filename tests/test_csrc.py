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

from grpo_fast.head import cuda

ROOT = Path(__file__).resolve().parents[1]
FAKE_NVCC = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
BROKEN_NVCC = "#!/bin/sh\necho no such architecture >&2\nexit 1\n"


def cubin(source: str, capability: int, folder: Path) -> tuple[str, str]:
    """The compiler's resource report, and the machine code."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    pytest.importorskip("triton", reason="its wheel carries cuobjdump")
    from benchmarks.aot import cuobjdump

    output = folder / "kernel.cubin"
    command = [compiler, "-std=c++17", "-O3", "-Xptxas=-v", f"-arch=sm_{capability}", "-cubin"]
    done = subprocess.run(
        [*command, ROOT / "csrc" / source, "-o", output], capture_output=True, text=True, check=True
    )
    return done.stderr, cuobjdump("-sass", str(output))


@pytest.mark.parametrize(("capability", "blocks"), [(80, 4), (90, 6)])
def test_the_hidden_gradient_moves_16_bytes_a_copy_and_registers_allow_what_shared_memory_does(
    tmp_path, capability, blocks
):
    report, code = cubin("hidden_gradient.cu", capability, tmp_path)

    functions = re.split(r"\n\s*Function : ", code)[1:]
    aligned = [text for text in functions if "Aligned" in text.split("\n")[0].replace("Unaligned", "")]
    assert len(functions) == 8 and len(aligned) == 6
    assert all("LDGSTS.E.BYPASS.128" in text and "STG.E.128" in text for text in aligned)
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    registers = dict(
        re.findall(r"Compiling entry function '(\w+)'[^']*(?:.*\n)*?.*Used (\d+) registers", report)
    )
    one_vector = [int(used) for name, used in registers.items() if "7Aligned" in name and "Li1E" in name]
    assert len(one_vector) == 2 and max(one_vector) * 256 * blocks <= 65_536


def test_the_mass_curve_keeps_its_histogram_in_shared_memory(tmp_path):
    report, code = cubin("mass_curve.cu", 90, tmp_path)

    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    assert not re.search(r"\b(?:LDL|STL|ATOMS|RED)\b", code)


def run_sanitized(sanitizer: str, sources: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Every kernel, emulated under one of g++'s sanitizers."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of csrc/ needs g++")
    program = folder / "run"
    files = [ROOT / "tests" / "csrc_run.cpp", *sorted(sources.glob("*.cu"))]
    options = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", f"-I{sources}", "-x", "c++"]
    done = subprocess.run([compiler, *options, *files, "-o", program], capture_output=True, text=True)
    if "cannot find -l" in done.stderr or "cannot find lib" in done.stderr:
        pytest.skip(f"g++ came without its {sanitizer} sanitizer")
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    if "FATAL: " in ran.stderr:
        pytest.skip(f"the sanitizer cannot run here: {ran.stderr[:200]}")
    return ran


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_emulated_kernels_have_no_race_and_no_bad_access(tmp_path, sanitizer):
    done = run_sanitized(sanitizer, ROOT / "csrc", tmp_path)

    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_a_forgotten_barrier_would_be_seen(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    kernel = tmp_path / "csrc" / "hidden_gradient.cu"
    call = "const int count = keep_entries(call, row, first, kept, warp_kept);\n"
    kernel.write_text(kernel.read_text().replace(f"{call}    __syncthreads();", call))

    done = run_sanitized("thread", tmp_path / "csrc", tmp_path)

    assert "data race" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("grpo_fast", "kernels", "csrc", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_cuda"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(
    checkout: Path, nvcc: str | None, wanted: str | None, *, in_place: bool = False
) -> subprocess.CompletedProcess[str]:
    """A wheel in `checkout/out`, or the library beside its sources; with this nvcc and no other."""
    tools = checkout / "tools"
    (tools / "bin").mkdir(parents=True)
    if nvcc is not None:
        (tools / "bin" / "nvcc").write_text(nvcc)
        (tools / "bin" / "nvcc").chmod(0o755)
    environment = os.environ | {"PATH": f"{tools / 'bin'}:/usr/bin:/bin", "CUDA_HOME": str(tools)}
    environment.pop("CUDA_PATH", None)
    environment.pop("GRPO_FAST_CUDA", None)
    if wanted is not None:
        environment["GRPO_FAST_CUDA"] = wanted
    if nvcc is None:
        source = (checkout / "setup.py").read_text()
        (checkout / "setup.py").write_text(source.replace("/usr/local/cuda", str(tools / "none")))
    pip = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", "out", "."]
    command = [sys.executable, *(["setup.py", "build_ext", "--inplace"] if in_place else pip)]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def packed(checkout: Path) -> tuple[str, bool]:
    """The wheel's tags, and whether it holds the library."""
    (wheel,) = (checkout / "out").glob("*.whl")
    return wheel.stem.split("-", 2)[2], "grpo_fast/_cuda/libgrpo_fast.so" in zipfile.ZipFile(wheel).namelist()


def test_with_nvcc_the_wheel_holds_the_library_for_any_python(checkout):
    done = build(checkout, FAKE_NVCC, None)

    assert done.returncode == 0, done.stdout + done.stderr
    tags, holds = packed(checkout)
    assert holds and tags.startswith("py3-none-") and not tags.endswith("-any")


@pytest.mark.parametrize(("nvcc", "wanted"), [(None, None), (FAKE_NVCC, "0")], ids=["no nvcc", "not wanted"])
def test_without_the_library_the_wheel_is_pure(checkout, nvcc, wanted):
    done = build(checkout, nvcc, wanted)

    assert done.returncode == 0, done.stdout + done.stderr
    assert packed(checkout) == ("py3-none-any", False)


def test_a_checkout_builds_the_library_where_the_head_looks_for_it(checkout):
    done = build(checkout, FAKE_NVCC, "1", in_place=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / cuda.LIBRARY.relative_to(ROOT)).is_file()


def test_an_nvcc_that_fails_costs_the_library_and_not_the_installation(checkout):
    done = build(checkout, BROKEN_NVCC, None)

    assert done.returncode == 0, done.stdout + done.stderr
    assert not packed(checkout)[1]


@pytest.mark.parametrize(
    ("nvcc", "wanted", "sentence"),
    [
        (None, "1", "nvcc is neither on PATH nor in CUDA_HOME: install CUDA"),
        (BROKEN_NVCC, "1", "no such architecture"),
        (None, "yes", "GRPO_FAST_CUDA='yes': give 0"),
    ],
    ids=["no nvcc", "broken nvcc", "neither 0 nor 1"],
)
def test_a_library_that_must_be_built_and_cannot_is_an_error(checkout, nvcc, wanted, sentence):
    done = build(checkout, nvcc, wanted)

    assert done.returncode
    assert sentence in done.stdout + done.stderr
