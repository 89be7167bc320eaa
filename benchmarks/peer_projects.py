"""The peers' tests of what we replace, and our functions under the peers' names for them.

A function of a peer's name makes ours take the names that the peer's tests import; each is called in the test
file itself, before it imports anything, so that processes which a test spawns see the names, too.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_STUBS = ExitStack()


@cache
def trl() -> None:
    """`ChunkedLogProbFunction`."""
    import trl.kernels
    import trl.kernels.chunked_logprob

    from grpo_fast.integrations.trl.patch import FusedHead

    for module in (trl.kernels, trl.kernels.chunked_logprob):
        vars(module)["ChunkedLogProbFunction"] = FusedHead


@cache
def liger() -> None:
    """The modules, their autograd functions, the functional forms, and the log-probability of a chunk."""
    import liger_kernel.chunked_loss as theirs
    from liger_kernel.chunked_loss import functional
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    from grpo_fast import linear_logprob
    from grpo_fast.integrations import liger as ours

    for kind in ("GRPO", "DPO", "ORPO", "SimPO", "CPO", "KTO"):
        name = f"LigerFusedLinear{kind}"
        module = getattr(ours, f"{name}Loss")
        home = importlib.import_module(f"liger_kernel.chunked_loss.{kind.lower()}_loss")
        function = _as_function(getattr(home, f"{name}Function").forward, module)
        setattr(theirs, f"{name}Loss", module)
        setattr(home, f"{name}Loss", module)
        setattr(home, f"{name}Function", types.SimpleNamespace(apply=function))
        setattr(functional, f"liger_fused_linear_{kind.lower()}", function)

    def chunk_forward(
        rows: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor:
        return linear_logprob(rows, weight, ids, bias=bias, temperature=temperature).logprob

    LigerFusedLinearPPOBase.chunk_forward = staticmethod(chunk_forward)


def _as_function(signature_of: Callable[..., Any], module: type[nn.Module]) -> Callable[..., Any]:
    """A module called by the positional arguments of an autograd function's forward."""
    signature = inspect.signature(signature_of)
    names = [name for name in signature.parameters if name not in ("cls", "ctx")]
    settings = set(inspect.signature(module).parameters)

    def apply(*arguments: Any) -> Any:
        given = dict(zip(names, arguments, strict=False))
        given["lin_weight"] = given.pop("weight")
        if given.get("sapo_temperature_neg") is False:  # a test of Liger's is one place behind its signature
            del given["sapo_temperature_neg"]
        built = module(**{name: value for name, value in given.items() if name in settings})
        return built(**{name: value for name, value in given.items() if name not in settings})

    return apply


@cache
def cce() -> None:
    """`linear_cross_entropy`, all but its `torch_compile` implementation."""
    import cut_cross_entropy

    from grpo_fast import linear_logprob

    theirs = cut_cross_entropy.linear_cross_entropy

    def linear_cross_entropy(
        e: Tensor,
        c: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        *,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: int = 0,
        return_lse: bool = False,
        impl: str = "cce",
        vocab_parallel_options: Any = None,
    ) -> Any:
        if impl == "torch_compile":
            return theirs(e, c, targets, bias, softcap=softcap, reduction=reduction, shift=shift, impl=impl)
        if shift:
            e, targets = e[:, : -int(shift)], targets[:, int(shift) :]
        group = None
        if vocab_parallel_options is not None:
            group = vocab_parallel_options.group or torch.distributed.group.WORLD
        out = linear_logprob(
            e,
            c,
            targets,
            bias=bias,
            softcap=softcap,
            outputs=("logprob", "logsumexp"),
            tolerance=0.0 if impl == "cce_exact" else None,
            process_group=group,
        )
        loss = -out.logprob if reduction == "none" else -out.logprob.sum()
        if reduction == "mean":
            loss = loss / (targets != -100).sum()
        return (loss, out.logsumexp) if return_lse else loss

    cut_cross_entropy.linear_cross_entropy = linear_cross_entropy


@cache
def verl() -> None:
    """Both fused backends: the adapter patches when it is imported."""
    _stub("ray", "tensordict", "omegaconf", "hydra", "codetiming", "orjson", "torchdata", "cloudpickle")
    importlib.import_module("grpo_fast.integrations.verl")


@cache
def prime_rl() -> None:
    """The fused output layers."""
    if "jaxtyping" in _stub("torchtitan", "loguru", "pydantic_config", "wandb", "jaxtyping", "beartype"):
        import jaxtyping

        jaxtyping.jaxtyped = lambda **_: lambda function: function
    import prime_rl.trainer

    if not hasattr(prime_rl, "__version__"):  # a checkout has it in its project file only
        project = Path("pyproject.toml").read_text()
        prime_rl.__version__ = re.findall(r'^version = "(.+)"', project, re.MULTILINE)[0]
    models = types.ModuleType("prime_rl.trainer.models")
    models.__path__ = [f"{path}/models" for path in prime_rl.trainer.__path__]
    sys.modules[models.__name__] = models
    from prime_rl.trainer.models.layers import lm_head

    vars(models)["cast_float_and_contiguous"] = lm_head.cast_float_and_contiguous
    from grpo_fast.integrations import prime_rl as adapter

    adapter.patch()


def _stub(*names: str) -> frozenset[str]:
    """Those that a peer imports, the tested functions do not use, and are absent. For this process's life."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "integrations"))
    return _STUBS.enter_context(importlib.import_module("host_stubs").stubbed(*names))


VERL_DRIVER = """
from types import SimpleNamespace

import pytest
import torch
from test_linear_cross_entropy import TestLinearCrossEntropy as Case

Case.__test__ = False
EVENT = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 0.0)


@pytest.mark.parametrize("index", range(5))
def test_forward_and_backward(index, monkeypatch):
    case = Case(index)
    if not torch.cuda.is_available():
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: EVENT)
        full = case.generate_hyper

        def reduced():
            full()
            case.num_tokens, case.vocab_size = case.num_tokens // 16, case.vocab_size // 16

        case.generate_hyper = reduced
    case.verify_correctness(iterations=2)
"""
ALWAYS, WITHOUT_GPU, UNLESS_LARGE = "always", "without a GPU", "without a GPU, unless --large"


@dataclass(frozen=True)
class Suite:
    """A project's tests of what we replace."""

    url: str
    copied: tuple[str, ...]  # from the checkout into the scratch folder
    tests: tuple[str, ...]  # pytest's arguments, in the scratch folder
    written: dict[str, str] = field(default_factory=dict)  # files of the scratch folder, and their text
    import_path: tuple[str, ...] = (".",)  # in the scratch folder
    on_cpu: tuple[tuple[str, str], ...] = ()  # replaced in the tests where there is no GPU
    left_out: dict[str, tuple[str, str]] = field(default_factory=dict)  # pattern of a test's name: when, why
    failures: dict[str, str] = field(default_factory=dict)  # pattern of name and message: kind


TO_CPU = (
    ('device="cuda"', 'device="cpu"'),
    ("skipif(not torch.cuda.is_available()", "skipif(False"),
    ("torch.bfloat16 and not torch.cuda.is_available()", "False"),
    ("torch.cuda.manual_seed", "torch.manual_seed"),
)
SUITES = {
    "trl": Suite(
        url="https://github.com/huggingface/trl",
        copied=("tests/test_kernels.py",),
        tests=("tests/test_kernels.py",),
        written={
            "tests/__init__.py": "",
            "tests/testing_utils.py": "def require_torch_accelerator(test):\n    return test\n",
        },
        left_out={
            "TestLogProbEntropy": (ALWAYS, "tests a kernel on logits, which has no counterpart of ours"),
            "TestChunkedLogProbFunction::test_forward": (
                ALWAYS,
                "patches torch.mm and counts TRL's own chunks",
            ),
        },
        failures={
            r"bfloat16|test_bias\[dtype1\]": "logits are float32, where the test rounds them to bfloat16",
            "test_is_top1_matches_argmax_with_ties": "of two equal rows of the head each is the argmax",
        },
    ),
    "liger": Suite(
        url="https://github.com/linkedin/Liger-Kernel",
        copied=("test",),
        tests=tuple(
            f"test/chunked_loss/test_{kind}_loss.py"
            for kind in ("grpo", "dpo", "orpo", "simpo", "cpo", "kto")
        ),
        left_out={
            "triton_(grpo|loss)|triton.*grpo": (WITHOUT_GPU, "Liger's own Triton kernel on a GPU"),
            "8-128-1024-4096": (UNLESS_LARGE, "large shape, some ten seconds a test on a CPU: --large"),
        },
        failures={
            "luspo.*dtype0.*4096": "the reference rounds logits to bfloat16, and luspo multiplies by lengths"
        },
    ),
    "cce": Suite(
        url="https://github.com/apple/ml-cross-entropy",
        copied=("cut_cross_entropy", "tests"),
        tests=tuple(
            f"tests/test_{name}.py" for name in ("vocab_parallel", "cce_loss_forward", "cce_loss_backward")
        ),
        on_cpu=TO_CPU,
        left_out={
            "torch_compile": (ALWAYS, "CCE's own torch.compile implementation"),
            "test_partition_n_into_range": (ALWAYS, "CCE's own arithmetic of ranges"),
            "test_loss_backward.*cce_exact": (
                WITHOUT_GPU,
                "on a CPU the same function of ours as for 'cce'",
            ),
        },
    ),
    "verl": Suite(
        url="https://github.com/volcengine/verl",
        copied=("tests/utils/test_linear_cross_entropy.py",),
        tests=("driver.py",),
        written={"driver.py": VERL_DRIVER},
        import_path=("tests/utils",),
        # verl's own baseline takes labels (1, N) through flash-attention only.
        on_cpu=(*TO_CPU, ("labels=labels, inplace", "labels=labels.squeeze(0), inplace")),
    ),
    "prime_rl": Suite(
        url="https://github.com/PrimeIntellect-ai/prime-rl",
        copied=(
            "pyproject.toml",
            "src/prime_rl",
            "packages/prime-rl-configs/src",
            "tests/unit/train/rl/test_fused_lm_head.py",
        ),
        tests=("tests/unit/train/rl/test_fused_lm_head.py",),
        import_path=("src", "packages/prime-rl-configs/src"),
        on_cpu=(('"cuda"', '"cpu"'),),
    ),
}
