"""`grpo-fast doctor`: check libraries, devices, kernels and rollout engines."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from grpo_fast.config.lookup import requirements
from grpo_fast.rollout.vllm import installed_version, version_problem

NOT_OURS = ("test", "trl")  # extras that training does not need


class Finding(NamedTuple):
    """One line of the diagnosis."""

    state: str  # "ok", "missing" or "broken"
    name: str
    detail: str
    essential: bool = False  # training needs it


def doctor(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the findings; 0 where training can work."""
    findings = [*examine()]
    for state, name, detail, _essential in findings:
        print(f"{state:<8}{name:<{max(len(finding.name) for finding in findings)}}  {detail}")
    healthy = all(finding.state == "ok" for finding in findings if finding.essential)
    print("everything that training needs is installed" if healthy else "training cannot work")
    return 0 if healthy else 1


def examine() -> Iterator[Finding]:
    """Check this machine; a check that fails is a finding."""
    for check in (libraries, devices, head, kernels_name):
        try:
            yield from check()
        except Exception as error:
            yield Finding("broken", check.__name__, repr(error), True)


def libraries() -> Iterator[Finding]:
    """Compare installed with required versions; the trainer's libraries are essential."""
    for text, module, extra in requirements():
        wanted, essential = Requirement(text), extra in ("", "train")
        name = wanted.name
        if name in ("vllm", "grpo-fast") or extra in NOT_OURS:
            continue
        asked = f"grpo-fast[{extra}]" if extra else text
        remedy = f"pip install --upgrade '{asked}'"
        try:
            version = importlib.metadata.version(name)
            if not wanted.specifier.contains(version, prereleases=True):
                raise ImportError(f"{version} is not {wanted.specifier}")
            if essential:
                importlib.import_module(module)
            yield Finding("ok", name, version, essential)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", name, remedy, essential)
        except Exception as error:
            yield Finding("broken", name, f"{error}: {remedy}", essential)
    vllm = installed_version()  # builds have other names
    state = "missing" if vllm is None else "broken" if version_problem(vllm) else "ok"
    yield Finding(state, "vllm", version_problem(vllm) or f"{vllm}, for rollout.engine")


def devices() -> Iterator[Finding]:
    """Describe the CPU and each GPU."""
    import torch

    from grpo_fast.policy.driver import hidden_gpu
    from grpo_fast.policy.load import faster_dtype

    threads = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    yield Finding("ok", "cpu", f"{threads}; model.dtype = auto is {faster_dtype()}")
    for index in range(torch.cuda.device_count()):
        facts, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        detail = f"{facts.name}, compute capability {facts.major}.{facts.minor}, {memory}"
        yield Finding("ok", f"cuda:{index}", detail)
    if (problem := hidden_gpu()) is not None:
        yield Finding("broken", "cuda", problem, True)
    elif not torch.cuda.device_count():
        yield Finding("missing", "cuda", f"training runs on the CPU; torch's CUDA is {torch.version.cuda}")


def head() -> Iterator[Finding]:
    """Run the head forward and backward, and compare its kernels with torch."""
    import torch

    from grpo_fast.head import HeadParameters, linear_logprob, warm_up
    from grpo_fast.head.operator import backend_on

    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    like: Any = {"dtype": torch.bfloat16, "device": where}
    hidden, weight = (torch.randn(n, 64, **like).requires_grad_() for n in (4, 256))
    linear_logprob(hidden, weight, torch.arange(4, device=where)).logprob.sum().backward()
    kernels = backend_on(weight.device.type, weight.device.index, weight.dtype) == "triton"
    if kernels:
        warm_up(HeadParameters(weight), implementation="triton")
    how = "kernels that agree with torch" if kernels else "plain torch"
    yield Finding("ok", "head", f"forward and backward on {where} by {how}", True)


def kernels_name() -> Iterator[Finding]:
    """Find a top-level package `kernels` that transformers would take for the hub's."""
    spec, name = importlib.util.find_spec("kernels"), "top-level `kernels`"
    hub = any(found.metadata["Name"] == "kernels" for found in importlib.metadata.distributions())
    if hub or spec is None or spec.origin is None:
        yield Finding("ok", name, "the hub's package" if hub else "not a package, as it must be", True)
    else:
        yield Finding("broken", name, f"rename {spec.origin}, or remove its folder from sys.path", True)
