"""After a warm-up no later call compiles a kernel, by Triton's cache keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_fast.head import HeadParameters, warm_up

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
_PROGRAM = """
import json, logging, sys
from functools import partial
from itertools import product
from unittest import mock
import torch
import aot
from grpo_fast import GRPOLossConfig, linear_grpo_loss
from grpo_fast.head import HeadParameters, accelerated, linear_kl, linear_logprob, operator, plan, warm_up

logging.disable()
LOSSES = {}, {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.01, "kl_estimator": "k2"}
OF_HEADS = {"beta": 0.1, "kl_estimator": "exact"}, {"loss_type": "opd", "jsd_beta": 0.5}
hopper = plan.Device("cuda", (9, 0), aot.SHARED_MEMORY["sm_90"], has_triton=True)

def step(head, loss, rows, captured):
    row, ids, targets = torch.zeros(rows), torch.arange(rows) // 4, torch.zeros(rows, dtype=torch.int64)
    hidden = torch.zeros(rows, head.weight.shape[1], dtype=head.weight.dtype, requires_grad=True)
    into = torch.zeros_like(head.weight, dtype=torch.float32) if head.weight.requires_grad else None
    reference = {"ref_hidden": hidden.detach(), "ref_weight": head.weight.detach()}
    with torch.no_grad():
        linear_logprob(hidden, head.weight, targets, **head.options)
    if loss.distills:
        found = linear_kl(hidden, head.weight, targets == 0, direction="jsd", **reference, **head.options)
        return torch.autograd.grad(found.divergence.sum(), (hidden, head.weight))
    if loss.compares_heads:
        found = linear_grpo_loss(
            hidden, head.weight, targets, row, sequence_ids=ids, config=loss, entropy=True, **reference,
            **head.options,
        ).loss
        return torch.autograd.grad(found, (hidden, head.weight))
    with mock.patch.object(accelerated, "_capturing", lambda _: captured):
        for old in (None, row):
            found = linear_grpo_loss(
                hidden, head.weight.detach(), targets, row, sequence_ids=ids, num_sequences=-(-rows // 4),
                old_logprobs=old, ref_logprobs=row if loss.needs_reference else None, config=loss,
                entropy=True, weight_grad=into, **head.options,
            )
            torch.autograd.grad(found.loss, hidden)

def later(head, loss):
    with mock.patch.object(plan, "_DENSE_WORKSPACE_BYTES", 1 << 20):  # several chunks of few rows
        for rows, captured in product((1, 16, 160), (False, True)):
            step(head, loss, rows, captured)

found = []
with (
    mock.patch.object(operator, "device_facts", lambda *_: hopper),
    mock.patch.object(sys.modules["grpo_fast.head.warm_up"], "check_kernels", lambda *_: None),
    mock.patch.object(accelerated, "_read_later", lambda _: lambda: 1),  # nothing runs: values are garbage
    mock.patch.object(torch.Tensor, "nonzero", lambda rows: torch.arange(len(rows))[:, None]),
):
    cases = product((5120, 32_001), (1, 0), LOSSES, (None, 0.0))
    for vocabulary, trainable, options, tolerance in (*cases, *product((5120,), (1,), OF_HEADS, (None,))):
        weight = torch.zeros(vocabulary, 64, dtype=torch.bfloat16, requires_grad=bool(trainable))
        head, loss = HeadParameters(weight, tolerance=tolerance), GRPOLossConfig(**options)
        warm = partial(warm_up, head, loss=loss, weight_grad=torch.float32)
        known = aot.variants("sm_90", [warm])
        assert weight.grad is None
        found.append([known, aot.variants("sm_90", [warm, partial(later, head, loss)])])
print(json.dumps(found))
"""


def test_after_a_warm_up_no_step_compiles_a_kernel():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(KERNELS)])

    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 18
    for known, after in found:
        assert known["logit_gradient_kernel"] and sum(known.values()) >= 10 and after == known


def test_where_no_kernel_runs_nothing_is_warmed_up(make_call, monkeypatch):
    call = make_call()
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: pytest.fail("something was differentiated"))

    warm_up(HeadParameters(call.weight))
