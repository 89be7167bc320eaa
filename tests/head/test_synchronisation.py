"""What the head asks the host for. Meta tensors hold no numbers: whoever asks for one raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_fast.head import accelerated
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Device, HeadPlan, Workload, plan_head
from grpo_fast.head.problem import HeadProblem, Request, RowGradients, Wanted

ROWS, HIDDEN, VOCABULARY = 16_384, 2048, 151_936
HOPPER = Device("cuda", (9, 0), 232_448, has_triton=True)
EVERYTHING = Request(entropy=True, mean_logit=True, max_logit=True, log_sum_sq=True)


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    for kind in (jit.JITFunction, interpreter.InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", lambda kernel, grid: lambda *args, **options: None)


@pytest.fixture
def readbacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each readback asked for; all are answered by zero."""
    asked: list[int] = []

    def tolist(tensor: Tensor) -> list[int]:
        asked.append(tensor.numel())
        return [0] * tensor.numel()

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return asked


def make_problem() -> HeadProblem:
    hidden = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="meta")
    targets = torch.empty(ROWS, dtype=torch.int64, device="meta")
    return HeadProblem(hidden, weight, targets)


def make_plan(**changes) -> HeadPlan:
    work = Workload(ROWS, VOCABULARY, torch.bfloat16, hidden_size=HIDDEN, **changes)
    return plan_head(HOPPER, work)


@pytest.mark.parametrize("wanted", [Request(), EVERYTHING], ids=["log-probability", "everything"])
@pytest.mark.parametrize("way", [{}, {"keep": True}, {"jacobian": True, "tolerance": 0.0}], ids=str)
def test_the_forward_never_waits_for_the_device(wanted, way):
    plan = make_plan(**way, extra_statistics=wanted.extra_statistics)

    statistics, _ = accelerated.forward(make_problem(), wanted, plan)

    assert statistics.logprob.shape == (ROWS,)


def backward(plan: HeadPlan) -> None:
    problem = make_problem()
    statistics, state = accelerated.forward(problem, Request(), plan)
    gradients = RowGradients(torch.empty(ROWS, device="meta"))
    wanted = Wanted(True, True, False)
    certificate = Certificate.pending(torch.device("meta"))
    result = accelerated.backward(problem, statistics, gradients, wanted, state, certificate, plan)
    assert result.hidden.shape == (ROWS, HIDDEN) and result.weight.shape == (VOCABULARY, HIDDEN)


def test_the_sparse_backward_asks_once_and_for_two_numbers(readbacks):
    backward(make_plan())

    assert readbacks == [2]


def test_the_exact_backward_asks_only_which_rows_have_a_gradient(readbacks, monkeypatch):
    with pytest.raises(NotImplementedError, match="nonzero"):
        backward(make_plan(tolerance=0.0))

    monkeypatch.setattr(Tensor, "nonzero", lambda rows: torch.arange(len(rows), device="meta")[:, None])
    backward(make_plan(tolerance=0.0))

    assert not readbacks


def test_the_backward_from_what_was_kept_asks_nothing(readbacks):
    backward(make_plan(tolerance=0.0, keep=True))

    assert not readbacks
