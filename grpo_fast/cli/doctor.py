"""What is installed and what it allows: versions, devices, head path, engines, what to install for more."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from grpo_fast.rollout.vllm import installed_version, version_problem

State = Literal["ok", "missing", "broken"]

GPU_ONLY = ("vllm", "flash-attn", "liger-kernel")
# What the package's metadata does not name, or does not name as it is installed.
INSTALL = {
    "vllm": "pip install vllm  (in an environment whose torch it pins; see docs.vllm.ai)",
    "flash-attn": "pip install flash-attn --no-build-isolation",
    "reasoning-gym": "pip install 'grpo-fast[tasks]'  (Python 3.11 or later)",
}
PURPOSES = {
    "triton": "the head's kernels",
    "vllm": "fast generation",
    "flash-attn": "packed attention on a GPU",
    "liger-kernel": "fused layers on a GPU",
    "gguf": "models shipped as GGUF, such as the quickstart's",
    "reasoning-gym": "generated tasks, such as the quickstart's",
    "wandb": "Weights & Biases",
    "trackio": "trackio",
}
UNDECLARED = ("flash-attn; extra == 'attention'",)
NOT_OURS = ("test", "trl")  # extras of developers, and of those who train with another trainer


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    state: State
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
        return not any(finding.essential and finding.state != "ok" for finding in self._all())

    def record(self) -> dict[str, Any]:
        """For a program."""
        sections = {title: [asdict(f) for f in findings] for title, findings in self.sections.items()}
        return {"healthy": self.healthy, **sections}

    def text(self) -> str:
        """For a person: sections of findings, then what to do, one line each."""
        lines = []
        for title, findings in self.sections.items():
            width = max(len(finding.name) for finding in findings)
            lines.append(title)
            lines += [f"  {f.name:<{width}}  {f.state:<7}  {f.detail}".rstrip() for f in findings]
        remedies = [f"  {f.name}: {f.remedy}" for f in self._all() if f.remedy and f.state != "ok"]
        lines += ["for the rest", *remedies] if remedies else []
        lines.append("all that training needs is there" if self.healthy else "training cannot work like this")
        return "\n".join(lines)

    def _all(self) -> list[Finding]:
        return [finding for findings in self.sections.values() for finding in findings]


def examine(requirements: Iterable[str] | None = None) -> Diagnosis:
    """Look at this machine. Nothing is changed, and nothing raises: what fails to import is a finding.

    Args:
        requirements: libraries to look for, as in a package's metadata; by default grpo-fast's own.
    """
    if requirements is None:
        requirements = [*(importlib.metadata.requires("grpo-fast") or ()), *UNDECLARED]
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    libraries = [Finding("python", "ok", python, essential=True)]
    libraries += [finding for line in requirements if (finding := _library(Requirement(line)))]
    installed = {finding.name for finding in libraries if finding.state == "ok"}
    return Diagnosis(
        {
            "libraries": libraries,
            "devices": _devices(),
            "abilities": _abilities(installed),
            "layout": [_kernels_name(), _own_kernels()],
        }
    )


def _library(wanted: Requirement) -> Finding | None:
    """A library with its version; those of an extra are not essential."""
    extra = str(wanted.marker or "").partition("extra == ")[2].strip("\"'")
    if extra in NOT_OURS:
        return None
    name, essential = wanted.name, not extra
    package = f"'grpo-fast[{extra}]'" if extra else f"'{name}{wanted.specifier}'"
    install = INSTALL.get(name, f"pip install {package}")
    try:
        version = (installed_version() if name == "vllm" else None) or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        useless = name in GPU_ONLY and not _has_cuda()
        detail = f"for {PURPOSES.get(name, 'everything')}"
        return Finding(name, "missing", detail, essential, "" if useless else install)
    if name != "vllm" and not wanted.specifier.contains(version, prereleases=True):
        remedy = f"pip install --upgrade '{name}{wanted.specifier}'"
        return Finding(name, "broken", f"{version} is not {wanted.specifier}", essential, remedy)
    if essential and (problem := _import_problem(name.replace("-", "_").replace("pyyaml", "yaml"))):
        return Finding(name, "broken", f"{version}: {problem}", True, install)
    return Finding(name, "ok", version, essential)


def _import_problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"does not import: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _has_cuda() -> bool:
    if _import_problem("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def _devices() -> list[Finding]:
    if _import_problem("torch"):
        return [Finding("torch", "broken", "no device can be looked at", essential=True)]
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
    flags = set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    slow = "" if {"avx512_bf16", "amx_bf16"} & flags else "; bfloat16 is emulated, float32 may be faster"
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    detail = f"{os.cpu_count()} cores, torch uses {threads} threads, {memory}"
    return Finding("cpu", "ok", f"{detail}, {' '.join(features) or 'no vector features known'}{slow}")


def _abilities(installed: set[str]) -> list[Finding]:
    cuda = _has_cuda()
    found = [_head_path(), Finding("rollout: transformers", "ok", "everywhere", essential=True), _vllm(cuda)]
    for name, ability in (("flash-attn", "attention: flash-attn"), ("liger-kernel", "layers: liger")):
        problem = "needs a GPU" if not cuda else "" if name in installed else f"{name} is not installed"
        found.append(Finding(ability, "missing" if problem else "ok", problem or "available"))
    return found


def _vllm(cuda: bool) -> Finding:
    version = installed_version()
    if problem := version_problem(version):
        return Finding("rollout: vllm", "missing" if version is None else "broken", problem)
    used = "taken by rollout.engine = auto" if cuda else "on this CPU only by rollout.engine = vllm"
    return Finding("rollout: vllm", "ok", f"{version}, {used}")


def _head_path() -> Finding:
    """Which path the head takes for bfloat16 weights on the default device, and whether it runs there."""
    try:
        detail = _try_head()
    except Exception as error:
        problem = str(error).strip().splitlines() or ["no message"]
        return Finding("head", "broken", f"{type(error).__name__}: {problem[0]}", essential=True)
    return Finding("head", "ok", detail, essential=True)


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
