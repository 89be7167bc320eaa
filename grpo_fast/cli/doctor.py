"""What is installed and what it allows: versions, devices, head path, engines, what to install for more."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from grpo_fast.rollout.vllm import installed_version, version_problem

GPU_ONLY = ("vllm", "liger-kernel")
# What a library is for, and how it is got where its extra of ours does not do.
LIBRARIES = {
    "triton": ("the head's kernels", ""),
    "vllm": (
        "fast generation",
        "pip install vllm  (in an environment whose torch it pins: docs.vllm.ai)",
    ),
    "liger-kernel": ("fused layers on a GPU", ""),
    "bitsandbytes": ("a base in 4 bits, optimizer states in 8", ""),
    "gguf": ("models shipped as GGUF, such as the quickstart's", ""),
    "reasoning-gym": (
        "generated tasks, such as the quickstart's",
        "pip install 'grpo-fast[tasks]'  (Python 3.11 or later)",
    ),
    "verifiers": (
        "its environments",
        "pip install 'grpo-fast[verifiers]'  (Python 3.11 or later)",
    ),
    "wandb": ("Weights & Biases", ""),
    "trackio": ("trackio", ""),
}
NOT_OURS = ("test", "trl")  # extras of developers, and of those who train with another trainer


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str
    essential: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was looked at, by section."""

    sections: Mapping[str, Sequence[Finding]]

    @property
    def healthy(self) -> bool:
        """Whether nothing essential is missing or broken."""
        return not any(f.essential and f.state != "ok" for found in self.sections.values() for f in found)

    def record(self) -> dict[str, Any]:
        """For a program."""
        sections = {title: [asdict(f) for f in findings] for title, findings in self.sections.items()}
        return {"healthy": self.healthy, **sections}

    def text(self) -> str:
        """For a person: sections of findings, then what to do, one line each."""
        lines, remedies = [], []
        for title, findings in self.sections.items():
            width = max(len(finding.name) for finding in findings)
            lines.append(title)
            lines += [f"  {f.name:<{width}}  {f.state:<7}  {f.detail}".rstrip() for f in findings]
            remedies += [f"  {f.name}: {f.remedy}" for f in findings if f.remedy]
        lines += ["for the rest", *remedies] if remedies else []
        lines.append("all that training needs is there" if self.healthy else "training cannot work like this")
        return "\n".join(lines)


def doctor(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast doctor`: 0 where training can work."""
    diagnosis = examine()
    print(json.dumps(diagnosis.record(), indent=1) if args.json else diagnosis.text())
    return 0 if diagnosis.healthy else 1


def examine(requirements: Iterable[str] | None = None) -> Diagnosis:
    """Look at this machine. Nothing is changed, and nothing raises: what fails to import is a finding.

    Args:
        requirements: libraries to look for, as in a package's metadata; by default grpo-fast's own.
    """
    if requirements is None:
        requirements = importlib.metadata.requires("grpo-fast") or ()
    if problem := _problem(lambda: importlib.import_module("torch")):
        devices = [Finding("torch", "broken", f"no device can be looked at: {problem}", essential=True)]
    else:
        devices = _devices()
    cuda = any(device.name == "cuda:0" for device in devices)
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    libraries = [found for line in requirements if (found := _library(Requirement(line), cuda))]
    transformers = Finding("rollout: transformers", "ok", "everywhere", essential=True)
    return Diagnosis(
        {
            "libraries": [Finding("python", "ok", python, essential=True), *libraries],
            "devices": devices,
            "abilities": [_head_path(), transformers, _vllm(cuda)],
            "layout": [_kernels_name(), _own_kernels()],
        }
    )


def _library(wanted: Requirement, cuda: bool) -> Finding | None:
    """A library with its version; those of an extra are not essential."""
    extra = str(wanted.marker or "").partition("extra == ")[2].strip("\"'")
    if extra in NOT_OURS:
        return None
    name, essential = wanted.name, not extra
    purpose, install = LIBRARIES.get(name, ("everything", ""))
    package = f"'grpo-fast[{extra}]'" if extra else f"'{name}{wanted.specifier}'"
    install = install or f"pip install {package}"
    try:
        version = (installed_version() if name == "vllm" else None) or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        remedy = install if cuda or name not in GPU_ONLY else ""
        return Finding(name, "missing", f"for {purpose}", essential, remedy)
    if name != "vllm" and not wanted.specifier.contains(version, prereleases=True):
        remedy = f"pip install --upgrade '{name}{wanted.specifier}'"
        return Finding(name, "broken", f"{version} is not {wanted.specifier}", essential, remedy)
    module = name.replace("-", "_").replace("pyyaml", "yaml")
    if essential and (problem := _problem(lambda: importlib.import_module(module))):
        return Finding(name, "broken", f"{version}: does not import: {problem}", True, install)
    return Finding(name, "ok", version, essential)


def _problem(attempt: Callable[[], object]) -> str:
    """What an attempt raises, in one line; nothing where it succeeds."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    return ""


def _devices() -> list[Finding]:
    import torch

    findings = [_cpu(torch.get_num_threads())]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = (
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"{facts.multi_processor_count} SMs, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        findings.append(Finding(f"cuda:{index}", "ok", detail))
    if not torch.cuda.device_count():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "no GPU is visible"
        findings.append(Finding("cuda", "missing", f"{reason}; training runs on the CPU"))
    return findings


def _cpu(threads: int) -> Finding:
    import psutil

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    slow = "" if {"avx512_bf16", "amx_bf16"} & flags else "; bfloat16 is emulated, float32 may be faster"
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    detail = f"{os.cpu_count()} cores, torch uses {threads} threads, {memory}"
    return Finding("cpu", "ok", f"{detail}, {' '.join(features) or 'no vector features known'}{slow}")


def _vllm(cuda: bool) -> Finding:
    version = installed_version()
    if problem := version_problem(version):
        return Finding("rollout: vllm", "missing" if version is None else "broken", problem)
    used = "taken by rollout.engine = auto" if cuda else "on this CPU only by rollout.engine = vllm"
    return Finding("rollout: vllm", "ok", f"{version}, {used}")


def _head_path() -> Finding:
    """Which path the head takes for bfloat16 weights on the default device, and whether it runs there."""
    details: list[str] = []
    problem = _problem(lambda: details.append(_try_head()))
    return Finding("head", "broken" if problem else "ok", problem or details[0], essential=True)


def _try_head() -> str:
    """The head's plan of a usual workload, after a forward and a backward on a few numbers."""
    import torch

    from grpo_fast.head import linear_logprob
    from grpo_fast.head.operator import device_facts
    from grpo_fast.head.plan import Workload, plan_head

    where = "cuda" if torch.cuda.is_available() else "cpu"
    plan = plan_head(device_facts(where, None), Workload(rows=4096, vocabulary=151_936, dtype=torch.bfloat16))
    hidden = torch.ones(4, 64, dtype=torch.bfloat16, device=where, requires_grad=True)
    weight = torch.ones(256, 64, dtype=torch.bfloat16, device=where, requires_grad=True)
    linear_logprob(hidden, weight, torch.arange(4, device=where)).logprob.sum().backward()
    return f"{plan.path} path on {where}, {plan.backward} backward"


def _kernels_name() -> Finding:
    """An importable top-level `kernels` that is not the hub's package breaks transformers."""
    spec, name = importlib.util.find_spec("kernels"), "top-level `kernels`"
    if spec is None or spec.origin is None:
        return Finding(name, "ok", "not a package, as it must be", essential=True)
    try:
        return Finding(name, "ok", f"the hub's, {importlib.metadata.version('kernels')}", essential=True)
    except importlib.metadata.PackageNotFoundError:
        detail = f"{spec.origin} is taken by transformers for the hub's package"
        remedy = "rename it, or remove its folder from sys.path"
        return Finding(name, "broken", detail, essential=True, remedy=remedy)


def _own_kernels() -> Finding:
    spec = importlib.util.find_spec("grpo_fast.kernels")
    if spec is None:
        remedy = "reinstall grpo-fast, or keep the checkout's kernels/ folder in place"
        return Finding("grpo_fast.kernels", "broken", "not found", essential=True, remedy=remedy)
    return Finding("grpo_fast.kernels", "ok", str(spec.origin), essential=True)
