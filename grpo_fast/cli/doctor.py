"""What is installed and what it allows: versions, devices, head path, engines, what to install for more."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from grpo_fast.rollout.vllm import installed_version, version_problem

GPU_ONLY = ("vllm", "liger-kernel")
PURPOSES = {
    "triton": "the head's kernels",
    "vllm": "fast generation",
    "liger-kernel": "fused layers on a GPU",
    "bitsandbytes": "a base in 4 bits",
    "torchao": "optimizer states in 8 bits, stochastic rounding",
    "gguf": "models shipped as GGUF, such as the quickstart's",
    "reasoning-gym": "generated tasks, such as the quickstart's",
    "verifiers": "its environments",
    "pillow": "prompts with images",
    "torchvision": "prompts with images, for Gemma 4",
    "wandb": "Weights & Biases",
    "trackio": "trackio",
}
INSTALL = {  # where the extra's name does not say all
    "vllm": "pip install vllm  (in an environment whose torch it pins: docs.vllm.ai)",
    "reasoning-gym": "pip install 'grpo-fast[tasks]'  (Python 3.11 or later)",
    "verifiers": "pip install 'grpo-fast[verifiers]'  (Python 3.11 or later)",
}
NOT_OURS = ("test", "trl")  # extras of developers, and of those who train with another trainer


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str
    essential: bool = False  # training needs it
    remedy: str = ""


def doctor(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`grpo-fast doctor`: 0 where training can work."""
    sections = examine()
    remedies = []
    for title, findings in sections.items():
        width = max(len(finding.name) for finding in findings)
        print(title)
        for f in findings:
            print(f"  {f.name:<{width}}  {f.state:<7}  {f.detail}".rstrip())
            remedies += [f"  {f.name}: {f.remedy}"] if f.remedy else []
    if remedies:
        print("for the rest", *remedies, sep="\n")
    healthy = not any(f.essential and f.state != "ok" for found in sections.values() for f in found)
    print("all that training needs is there" if healthy else "training cannot work like this")
    return 0 if healthy else 1


def examine() -> Mapping[str, Sequence[Finding]]:
    """Look at this machine, by section. Nothing raises: what fails to import is a finding."""
    if problem := _problem(lambda: importlib.import_module("torch")):
        devices = [Finding("torch", "broken", f"no device can be looked at: {problem}", essential=True)]
    else:
        devices = _devices()
    cuda = any(device.name == "cuda:0" for device in devices)
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    wanted = map(Requirement, importlib.metadata.requires("grpo-fast") or ())
    libraries = [found for one in wanted if (found := _library(one, cuda))]
    head: list[str] = []
    problem = _problem(lambda: head.append(_try_head()))
    return {
        "libraries": [Finding("python", "ok", python, essential=True), *libraries],
        "devices": devices,
        "abilities": [
            Finding("head", "broken" if problem else "ok", problem or head[0], essential=True),
            Finding("rollout: transformers", "ok", "everywhere", essential=True),
            _vllm(cuda),
        ],
        "layout": [_kernels_name()],
    }


def _library(wanted: Requirement, cuda: bool) -> Finding | None:
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
        remedy = install if cuda or name not in GPU_ONLY else ""
        return Finding(name, "missing", f"for {PURPOSES.get(name, 'everything')}", essential, remedy)
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
    import psutil
    import torch

    from grpo_fast.policy.load import faster_dtype

    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.exists() else set()
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    detail = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads, {memory}"
    features_text = " ".join(features) or "no vector features known"
    findings = [Finding("cpu", "ok", f"{detail}, {features_text}; model.dtype = auto is {faster_dtype()}")]
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


def _vllm(cuda: bool) -> Finding:
    version = installed_version()
    if problem := version_problem(version):
        return Finding("rollout: vllm", "missing" if version is None else "broken", problem)
    used = "taken by rollout.engine = auto" if cuda else "on this CPU only by rollout.engine = vllm"
    return Finding("rollout: vllm", "ok", f"{version}, {used}")


def _try_head() -> str:
    """The head's path for bfloat16 weights on the default device, after a forward and a backward."""
    import torch

    from grpo_fast.head import linear_logprob
    from grpo_fast.head.operator import device_facts
    from grpo_fast.head.plan import Workload, plan_head

    where = "cuda" if torch.cuda.is_available() else "cpu"
    plan = plan_head(device_facts(where, None), Workload(rows=4096, vocabulary=151_936, dtype=torch.bfloat16))
    hidden = torch.ones(4, 64, dtype=torch.bfloat16, device=where, requires_grad=True)
    weight = torch.ones(256, 64, dtype=torch.bfloat16, device=where, requires_grad=True)
    linear_logprob(hidden, weight, torch.arange(4, device=where)).logprob.sum().backward()
    return f"{plan.backend} path on {where}, {plan.backward} backward"


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
