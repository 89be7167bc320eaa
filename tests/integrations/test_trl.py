"""The head that TRL's trainers share, as it is and patched: same results, gradients, losses and metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", "1.16", reason="pip install --no-deps 'trl~=1.16.0'")

from host_stubs import with_gradients  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from trl.kernels import ChunkedLogProbFunction  # noqa: E402
from trl.trainer import utils  # noqa: E402
from words import History, assert_same_history, make_trainer, train  # noqa: E402

from grpo_fast.integrations.trl import patch, patched, unpatch  # noqa: E402
from grpo_fast.integrations.trl.patch import FusedHead  # noqa: E402

HEADS = {
    "plain": {},
    "bias and temperature": {"bias": True, "temperature": 0.7},
    "softcap and scale": {"softcap": 5.0, "scale": 0.5, "temperature": 1.3},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 rows, float32 weight": {"dtype": torch.bfloat16, "weight_dtype": torch.float32},
    "autocast": {"autocast": True},
}


@pytest.mark.parametrize("case", list(HEADS))
def test_the_head_has_trls_signature_results_and_gradients(case, rng):
    options = HEADS[case]
    kind = options.get("dtype", torch.float32)
    hidden = torch.randn(30, 16, generator=rng).to(kind)
    weight = (0.3 * torch.randn(50, 16, generator=rng)).to(options.get("weight_dtype", kind))
    bias = torch.randn(50, generator=rng) if options.get("bias") else None
    targets = torch.randint(50, (30,), generator=rng)
    tail = (options.get("temperature", 1.0), 32768, options.get("softcap"), options.get("scale", 1.0))
    results = []
    for head in (ChunkedLogProbFunction, FusedHead):
        leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16) if options.get("autocast") else nullcontext():
            out = head.apply(*leaves, targets, *tail)
        assert [value.requires_grad for value in out] == [True, True, False, False, False]
        results.append([*out[2:], *with_gradients(out[:2], [leaf for leaf in leaves if leaf is not None])])

    theirs, ours = results
    # TRL's logits are bfloat16 where its inputs are; ours are float32 there too.
    rounded = kind == torch.bfloat16 or options.get("autocast")
    if rounded:  # a rounded maximum may be another entry's
        ours[2] = theirs[2]
    limits = {"rtol": 0.05, "atol": 0.05} if rounded else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **limits)
    some = FusedHead.apply(hidden, weight, bias, targets, *tail, outputs=("log_probs", "is_top1"))
    assert [value is None for value in some] == [False, True, True, True, False]


def test_the_head_is_walked_while_zero3_has_gathered_it(rng, monkeypatch):
    """ZeRO-3 as the head meets it: the parameter holds its entries at two moments only."""
    whole, hidden = torch.randn(20, 8, generator=rng), torch.randn(6, 8, generator=rng)
    targets = torch.randint(20, (6,), generator=rng)
    gathered_tensors = []

    @contextmanager
    def gathered(weight: Tensor, bias: Tensor | None) -> Iterator[None]:
        gathered_tensors.append(weight)
        weight.data = whole.clone()
        yield
        weight.data = torch.full_like(whole, torch.nan)

    def run(weight: torch.nn.Parameter, context: AbstractContextManager) -> tuple[Tensor, ...]:
        rows = hidden.clone().requires_grad_()
        with context:
            out = FusedHead.apply(rows, weight, None, targets, 1.0, 8)
        (out[0].sum() + 0.1 * out[1].sum()).backward()
        return *out, rows.grad, weight.grad

    plain = run(torch.nn.Parameter(whole.clone()), nullcontext())
    adapter = sys.modules["grpo_fast.integrations.trl.patch"]  # of which a function has the name
    monkeypatch.setattr(adapter, "is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gathered)
    partitioned = torch.nn.Parameter(whole.clone())
    results = run(partitioned, gathered(partitioned, None))

    assert [tensor is partitioned for tensor in gathered_tensors] == [True, True]
    torch.testing.assert_close(results, plain)


def test_leaving_a_block_restores_what_was_there_before():
    before = dict(vars(utils))
    for outer in (nullcontext, patch):
        outer()
        inside = dict(vars(utils))
        with patched():
            assert utils._ChunkedLogProbFunction is FusedHead
        assert vars(utils) == inside
    unpatch()
    assert vars(utils) == before


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of our head gets."""
    rows, apply = [], FusedHead.apply

    def watching(hidden: Tensor, *arguments: Any) -> Any:
        rows.append(len(hidden))
        return apply(hidden, *arguments)

    monkeypatch.setattr(FusedHead, "apply", watching)
    return rows


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_masked_rows_never_reach_the_head_and_none_gives_zero(share, rows, model_folder, rng):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    labels = torch.randint(60, (3, 8), generator=rng)
    labels[torch.rand(3, 8, generator=rng) >= share] = -100

    with patched():
        out = model(input_ids=labels.clamp(min=0), labels=labels, fused_lm_head=True)
    out.loss.backward()

    assert rows == [int((labels[:, 1:] != -100).sum())]
    trained = any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert (out.loss != 0) == trained == (rows != [0])


TRAINERS = {
    "SFT": ({"prompt": "w1 w2", "completion": " w3 w4 w5"}, {}),
    "DPO": ({"prompt": "w1", "chosen": " w3 w4", "rejected": " w9"}, {}),
    "KTO": ({"prompt": "w1", "completion": " w3 w4", "label": True}, {}),
    "RLOO": ({"prompt": "w1 w2"}, {"num_generations": 2, "max_completion_length": 4}),
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_other_trainers_train_the_same_with_the_patch(kind, rows, model_folder):
    row, options = TRAINERS[kind]
    data = [{**row, "prompt": f"{row['prompt']} w{i}"} for i in range(8)]
    if "label" in row:
        data = [{**changed, "label": i % 2 == 0} for i, changed in enumerate(data)]
    options = {**options, "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3}

    def trained() -> History:
        made = getattr(trl, f"{kind}Trainer"), model_folder, data, getattr(trl, f"{kind}Config")
        return train(make_trainer(*made, **options))

    plain = trained()
    assert not rows
    with patched():
        assert_same_history(trained(), plain)
    assert rows
