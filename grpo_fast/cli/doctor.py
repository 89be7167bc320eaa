"""What is installed and what it allows: versions, devices, head path, engines, what to install for more."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_fast.rollout.vllm import installed_version, version_problem

if TYPE_CHECKING:
    from grpo_fast.head.plan import HeadPlan

State = Literal["ok", "missing", "broken"]

# Package, why it is wanted, and whether training works without it.
LIBRARIES = (
    ("torch", "everything", True),
    ("transformers", "models and tokenizers", True),
    ("datasets", "datasets", True),
    ("peft", "LoRA", True),
    ("pydantic", "configuration", True),
    ("safetensors", "checkpoints", True),
    ("accelerate", "loading large models", True),
    ("math-verify", "the math reward", True),
    ("tensorboard", "curves", True),
    ("triton", "the head's kernels", False),
    ("vllm", "fast generation", False),
    ("flash-attn", "packed attention on a GPU", False),
    ("liger-kernel", "fused layers on a GPU", False),
    ("gguf", "models shipped as GGUF, such as the quickstart's", False),
    ("reasoning-gym", "generated tasks, such as the quickstart's", False),
    ("wandb", "Weights & Biases", False),
    ("trackio", "trackio", False),
)
INSTALL = {
    "triton": "pip install 'grpo-fast[triton]'",
    "liger-kernel": "pip install 'grpo-fast[liger]'",
    "gguf": "pip install 'grpo-fast[gguf]'",
    "reasoning-gym": "pip install 'grpo-fast[tasks]'  (Python 3.11 or later)",
    "wandb": "pip install 'grpo-fast[wandb]'",
    "trackio": "pip install 'grpo-fast[trackio]'",
    "flash-attn": "pip install flash-attn --no-build-isolation",
}
GPU_ONLY = ("vllm", "flash-attn", "liger-kernel")
# Minimum versions, as the package's own metadata states them.
MINIMUM = {"torch": (2, 9), "triton": (3, 5), "transformers": (5, 10, 4)}


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
    """Everything that was looked at."""

    libraries: tuple[Finding, ...]
    devices: tuple[Finding, ...]
    abilities: tuple[Finding, ...]
    layout: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing essential is missing or broken."""
        return not any(finding.essential and finding.state != "ok" for finding in self._all())

    def record(self) -> dict[str, Any]:
        """For a program."""
        return {"healthy": self.healthy, **asdict(self)}

    def text(self) -> str:
        """For a person: sections of findings, then what to do, one line each."""
        lines = []
        for title in ("libraries", "devices", "abilities", "layout"):
            findings: tuple[Finding, ...] = getattr(self, title)
            width = max(len(finding.name) for finding in findings)
            lines.append(title)
            lines += [f"  {f.name:<{width}}  {f.state:<7}  {f.detail}".rstrip() for f in findings]
        remedies = [f"  {f.name}: {f.remedy}" for f in self._all() if f.remedy and f.state != "ok"]
        lines += ["for the rest", *remedies] if remedies else []
        lines.append("all that training needs is there" if self.healthy else "training cannot work like this")
        return "\n".join(lines)

    def _all(self) -> tuple[Finding, ...]:
        return self.libraries + self.devices + self.abilities + self.layout


def examine() -> Diagnosis:
    """Look at this machine. Nothing is changed, and nothing raises: what fails to import is a finding."""
    libraries = (_python(), *(_library(*row) for row in LIBRARIES))
    installed = {finding.name for finding in libraries if finding.state == "ok"}
    return Diagnosis(libraries, _devices(), _abilities(installed), (_kernels_name(), _own_kernels()))


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}", essential=True)


def _library(name: str, purpose: str, essential: bool) -> Finding:
    if name == "vllm" and (found := installed_version()) is not None:
        return Finding(name, "ok", found, essential)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        useless = name in GPU_ONLY and not _has_cuda()
        return Finding(name, "missing", f"for {purpose}", essential, "" if useless else _install(name))
    minimum = MINIMUM.get(name)
    if minimum and _numbers(version) < minimum:
        wanted = ".".join(map(str, minimum))
        return Finding(
            name, "broken", f"{version}, too old", True, f"pip install --upgrade '{name}>={wanted}'"
        )
    if essential:
        problem = _import_problem(name.replace("-", "_"))
        if problem:
            return Finding(name, "broken", f"{version}: {problem}", True, _install(name))
    return Finding(name, "ok", version, essential)


def _install(name: str) -> str:
    if name == "vllm":
        return "pip install vllm  (in an environment whose torch it pins; see docs.vllm.ai)"
    return INSTALL.get(name, f"pip install {name}")


def _numbers(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release


def _import_problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"does not import: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _devices() -> tuple[Finding, ...]:
    if _import_problem("torch"):
        return (Finding("torch", "broken", "no device can be looked at", essential=True),)
    import torch

    findings = [_cpu()]
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
    return tuple(findings)


def _cpu() -> Finding:
    import torch

    flags = _cpu_flags()
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    slow = "" if {"avx512_bf16", "amx_bf16"} & flags else "; bfloat16 is emulated, float32 may be faster"
    detail = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads, {_memory_text()}"
    return Finding("cpu", "ok", f"{detail}, {' '.join(features) or 'no vector features known'}{slow}")


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _memory_text() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"
    except (ValueError, OSError, AttributeError):
        return "memory unknown"


def _abilities(installed: set[str]) -> tuple[Finding, ...]:
    cuda = _has_cuda()
    found = [_head_path(), Finding("rollout: transformers", "ok", "everywhere", essential=True), _vllm(cuda)]
    for name, ability in (
        ("flash-attn", "attention: flash-attn"),
        ("liger-kernel", "layers: liger"),
    ):
        if not cuda:
            found.append(Finding(ability, "missing", "needs a GPU"))
        elif name in installed:
            found.append(Finding(ability, "ok", "available"))
        else:
            found.append(Finding(ability, "missing", f"{name} is not installed"))
    return tuple(found)


def _vllm(cuda: bool) -> Finding:
    version = installed_version()
    if problem := version_problem(version):
        return Finding("rollout: vllm", "missing" if version is None else "broken", problem)
    used = "taken by rollout.engine = auto" if cuda else "on this CPU only by rollout.engine = vllm"
    return Finding("rollout: vllm", "ok", f"{version}, {used}")


def _has_cuda() -> bool:
    if _import_problem("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def _head_path() -> Finding:
    """Which path the head takes for bfloat16 weights on the default device, and whether it runs there."""
    try:
        plan, kind = _head_plan()
        _try_head(kind)
    except Exception as error:
        problem = str(error).strip().splitlines() or ["no message"]
        return Finding("head", "broken", f"{type(error).__name__}: {problem[0]}", essential=True)
    return Finding("head", "ok", f"{plan.path} path on {kind}, {plan.backward} backward", essential=True)


def _head_plan() -> tuple[HeadPlan, str]:
    import torch

    from grpo_fast.head.plan import Device, Workload, plan_head

    work = Workload(rows=4096, vocabulary=151_936, dtype=torch.bfloat16)
    if not torch.cuda.is_available():
        return plan_head(Device("cpu"), work), "cpu"
    facts = torch.cuda.get_device_properties(0)
    device = Device(
        "cuda",
        capability=(facts.major, facts.minor),
        shared_memory=facts.shared_memory_per_block_optin,
        has_triton=importlib.util.find_spec("triton") is not None,
    )
    return plan_head(device, work), "cuda"


def _try_head(kind: str) -> None:
    """A forward and a backward on a few numbers."""
    import torch

    from grpo_fast.head import linear_logprob

    hidden = torch.ones(4, 64, dtype=torch.bfloat16, device=kind, requires_grad=True)
    weight = torch.ones(256, 64, dtype=torch.bfloat16, device=kind, requires_grad=True)
    linear_logprob(hidden, weight, torch.arange(4, device=kind)).logprob.sum().backward()


def _kernels_name() -> Finding:
    """An importable top-level `kernels` that is not the hub's package breaks transformers."""
    spec = importlib.util.find_spec("kernels")
    if spec is None or spec.origin is None:
        return Finding("top-level `kernels`", "ok", "not a package, as it must be", essential=True)
    try:
        return Finding(
            "top-level `kernels`", "ok", f"the hub's, {importlib.metadata.version('kernels')}", essential=True
        )
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "top-level `kernels`",
            "broken",
            f"{spec.origin} is taken by transformers for the hub's package",
            essential=True,
            remedy="rename it, or remove its folder from sys.path",
        )


def _own_kernels() -> Finding:
    spec = importlib.util.find_spec("grpo_fast.kernels")
    if spec is None:
        remedy = "reinstall grpo-fast, or keep the checkout's kernels/ folder in place"
        return Finding("grpo_fast.kernels", "broken", "not found", essential=True, remedy=remedy)
    return Finding("grpo_fast.kernels", "ok", str(spec.origin), essential=True)
