"""Peers with a function of hidden states and head. Each library is imported by the function that loads it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from ..problem import CROSS_ENTROPY, KL, Outcome, Problem, Run
from . import Function, Peer, Unsupported, of_cross_entropy, of_logprobs, require_cuda, require_loss

TRL_CHUNK = 32_768  # that its trainers use
UNSLOTH, UNSLOTH_FILE = "unsloth_zoo", "fused_losses/fused_linear.py"


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)


def full_logits(problem: Problem, *, compiled: bool = False) -> Run:
    def negative_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -cross_entropy((hidden @ weight.T).float(), targets, reduction="none")

    def kl(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        log_p = (hidden @ weight.T).float().log_softmax(1)
        log_q = (ref_hidden @ ref_weight.T).float().log_softmax(1)
        return kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)

    function = {CROSS_ENTROPY: negative_cross_entropy, KL: kl}.get(problem.loss, logprobs)
    if compiled:
        require_cuda(problem)
        function = torch.compile(function, dynamic=False)
    if problem.loss == KL:
        return divergence(problem, function)
    return lambda: problem.finish(function(problem.hidden, problem.weight, problem.targets))


def trl() -> Function:
    from trl.kernels import ChunkedLogProbFunction

    options = 1.0, TRL_CHUNK, None, 1.0, ()  # temperature, chunk, softcap, scale, more outputs
    apply = ChunkedLogProbFunction.apply
    return lambda hidden, weight, targets: apply(hidden, weight, None, targets, *options)[0]


def divergence(problem: Problem, function: Callable[..., Tensor]) -> Run:
    """Prepare a function of hidden states and head, and of the reference's, for the KL of each row."""

    def run() -> Outcome:
        found = function(problem.hidden, problem.weight, problem.ref_hidden, problem.ref_weight)
        return problem.finish_loss(found.mean(), found)

    return run


def trl_divergence(problem: Problem) -> Run:
    require_loss(problem, KL)
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def function(hidden: Tensor, weight: Tensor, *reference: Tensor) -> Tensor:
        return ChunkedDivergenceFunction.apply(hidden, weight, None, *reference, None, 1.0)[0]  # reverse KL

    return divergence(problem, function)


def cut_cross_entropy(reduction: str, *, preset: str) -> Function:
    """Load Apple's function. Release 25.1.1 has no presets, and is exact without its filter."""
    from cut_cross_entropy import LinearCrossEntropyImpl, linear_cross_entropy

    if preset.upper() in LinearCrossEntropyImpl.__members__:
        return partial(linear_cross_entropy, impl=preset, reduction=reduction)
    if preset == "cce_exact":
        return partial(linear_cross_entropy, filter_eps=None, reduction=reduction)
    raise Unsupported(f"this cut-cross-entropy has no preset {preset}: install it from its repository")


def unsloth(problem: Problem) -> Run:
    """Import the file without the package, which would patch transformers for the whole process.

    The first call tries to import the package, for a bound on the memory of a chunk; else it takes 2 GiB.
    """
    function = _file_of(UNSLOTH, UNSLOTH_FILE).fused_linear_logprobs
    sys.modules[UNSLOTH] = None
    try:
        with torch.no_grad():
            function(problem.hidden[:1], problem.weight, problem.targets[:1])
    finally:
        del sys.modules[UNSLOTH]
    targets = problem.targets.view(problem.sequences, -1)

    def run() -> Outcome:
        hidden = problem.hidden.view(*targets.shape, -1)
        return problem.finish(function(hidden, problem.weight, targets))

    return run


@cache
def _file_of(package: str, file: str) -> ModuleType:
    """Import one file without its package, and only once: it may register operators with torch."""
    found = find_spec(package)
    path = Path(found.origin).parent / file if found else None
    if path is None or not path.exists():
        raise ImportError(f"No module named {package!r} with {file}")
    spec = spec_from_file_location(f"grpo_fast_benchmarks_{package}", path)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl() -> Function:
    """Load verl's function, which always computes the entropy too."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    options = 1.0, "none", None  # temperature, reduction, process group
    return lambda *operands: linear_cross_entropy(*operands, *options)[0]


def torch_linear_cross_entropy(reduction: str) -> Function:
    """Load torch's function with its own choice of chunks."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unsupported(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    function, options = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return partial(function, reduction=reduction, options=options)


def quack() -> Function:
    from quack.linear_cross_entropy import linear_cross_entropy_func

    return lambda hidden, weight, targets: (
        -linear_cross_entropy_func(hidden, weight, None, targets, reduction="none", inplace_backward=True)
    )


def quack_chunked(reduction: str) -> Function:
    """Load QuACK's chunked function, which takes no upstream gradient per token."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return partial(chunked_linear_cross_entropy, reduction=reduction)


def flash_attn() -> Function:
    """Import the file of the Triton cross-entropy: the package needs its CUDA library."""
    cross_entropy_loss = _file_of("flash_attn", "ops/triton/cross_entropy.py").cross_entropy_loss
    return lambda hidden, weight, targets: (
        -cross_entropy_loss(hidden @ weight.T, targets, inplace_backward=True)[0]
    )


def rl_kernel() -> Function:
    """Load RL-Kernel's streaming Triton operator. No package index has it; install it from its repository."""
    from rl_engine.backends.shared.triton.logprob.linear_logp import TritonLinearLogpOp

    return TritonLinearLogpOp()


PEERS = (
    Peer("torch full logits", full_logits),
    Peer("torch.compile", partial(full_logits, compiled=True)),
    of_logprobs("TRL fused head", trl),
    Peer("TRL chunked divergence", trl_divergence),
    *(
        of_cross_entropy(f"Cut Cross Entropy ({name})", partial(cut_cross_entropy, preset=preset), cuda=True)
        for name, preset in (("filtered", "cce"), ("exact", "cce_exact"), ("Kahan", "cce_kahan_full_c"))
    ),
    Peer("Unsloth fused log-probabilities", unsloth),
    of_logprobs("verl Triton", verl, cuda=True),
    of_cross_entropy("torch linear_cross_entropy", torch_linear_cross_entropy),
    of_logprobs("QuACK on full logits", quack, cuda=True),
    of_cross_entropy("QuACK chunked cross-entropy", quack_chunked, cuda=True, alone=True),
    of_logprobs("flash-attn on full logits", flash_attn, cuda=True),
    of_logprobs("RL-Kernel Triton", rl_kernel, cuda=True),
)
