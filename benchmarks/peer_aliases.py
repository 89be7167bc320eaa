"""Our functions under the peers' names, for the peers' tests.

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

    for kind in ("GRPO",):
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
