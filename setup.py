"""Everything of the build that is not in pyproject.toml: the packages, and the CUDA library of `csrc/`.

The library is plain C to its callers and is built by nvcc alone, without torch. GRPO_FAST_CUDA=0 never builds
it, GRPO_FAST_CUDA=1 fails where it cannot be built; otherwise it is built where nvcc is found.
"""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

MAPPED = ["grpo_fast.kernels", "grpo_fast.benchmarks", "grpo_fast.benchmarks.peers"]  # by package-dir
SOURCES = ["csrc/count_pairs.cu"]
OPTIONS = [
    *("-std=c++17", "-O3", "-ftz=true", "-arch=all-major"),
    *("-shared", "-Xcompiler=-fPIC", "-cudart=static"),
]
WANTED = os.environ.get("GRPO_FAST_CUDA", "")


def nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which(
        "nvcc", path=os.pathsep.join([os.environ["PATH"], *(f"{home}/bin" for home in homes if home)])
    )


class BuildCuda(build_ext):
    """Builds the one extension, which is no Python module, at a name without Python's version."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([nvcc(), *OPTIONS, *SOURCES, "-o", output], capture_output=True, text=True)
        if done.returncode:
            raise CompileError(f"nvcc could not build csrc/:\n{done.stderr}")

    def copy_extensions_to_source(self):
        Path("grpo_fast/_cuda").mkdir(exist_ok=True)
        super().copy_extensions_to_source()


class AnyPython(bdist_wheel):
    """A wheel with the library is tied to the platform, not to a version of Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2]) if self.distribution.ext_modules else super().get_tag()


if WANTED not in ("", "0", "1"):
    raise SetupError(f"GRPO_FAST_CUDA={WANTED!r}: give 0 (never build csrc/), 1 (must) or leave it unset")
if WANTED == "1" and nvcc() is None:
    raise SetupError("GRPO_FAST_CUDA=1, but nvcc is neither on PATH nor in CUDA_HOME: install CUDA")
LIBRARY = Extension("grpo_fast._cuda.libgrpo_fast", SOURCES, optional=WANTED != "1")

setup(
    packages=[*find_packages(include=["grpo_fast", "grpo_fast.*"]), *MAPPED],
    ext_modules=[LIBRARY] if WANTED != "0" and nvcc() else [],
    cmdclass={"build_ext": BuildCuda, "bdist_wheel": AnyPython},
)
