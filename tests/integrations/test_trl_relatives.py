"""Trainers derived from TRL's that score logits: the same log-probabilities, entropies and gradients without.

The real Axolotl and ms-swift run here where they are installed with the TRL that they pin.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_fast.integrations.compat import private
from grpo_fast.integrations.host import unwrapped

KEPT = 5


@contextmanager
def logits_of(model: nn.Module) -> Iterator[list[int]]:
    """While open, the width of what each call of the head returns."""
    widths: list[int] = []
    hook = (
        unwrapped(model)
        .get_output_embeddings()
        .register_forward_hook(lambda _, inputs, output: widths.append(output.shape[-1]))
    )
    yield widths
    hook.remove()


@pytest.fixture(params=["axolotl", "swift"])
def adapter(request: pytest.FixtureRequest) -> Any:
    modules = {"axolotl": "core.trainers.grpo.trainer", "swift": "rlhf_trainers.grpo_trainer"}
    try:
        private(request.param, modules[request.param])
    except ImportError as error:
        pytest.skip(str(error))
    return importlib.import_module(f"grpo_fast.integrations.{request.param}")


@pytest.fixture
def methods(adapter: Any) -> dict[str, Callable[..., Any]]:
    """What computes (log-probabilities, entropies) of a host's trainer, by its name."""
    state = {
        "temperature": 0.7,
        "accelerator": SimpleNamespace(unwrap_model=lambda model, **_: model, is_main_process=True),
        "is_fsdp_enabled": False,
        "use_liger_kernel": False,
        "_entropy_bonus_enabled": False,
        "template": SimpleNamespace(padding_free=False),
    }
    keeps = {"model_kwarg_keys": ("logits_to_keep",)}

    def call(trainer: type, name: str, given: dict[str, Any], *args: Any, **options: Any) -> Any:
        method = getattr(trainer, name)  # looked up here, patched or not
        return tuple(method(SimpleNamespace(**state | given), *args, **options)[:2])

    if adapter.__name__.endswith("swift"):
        from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

        def local(model: nn.Module, ids: Tensor, mask: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
            inputs = {"input_ids": ids, "attention_mask": mask}
            return call(GRPOTrainer, "_get_logps_via_local_forward", given, model, inputs, KEPT, ids, True)

        return {
            "padded": lambda *inputs: local(*inputs, keeps),
            "padding-free": lambda *inputs: local(
                *(inputs[0], inputs[1].reshape(1, -1), inputs[2].reshape(1, -1)),
                {"model_kwarg_keys": (), "template": SimpleNamespace(padding_free=True)},
            ),
        }
    from axolotl.core.trainers.grpo.async_trainer import AsyncGRPOTrainer
    from axolotl.core.trainers.grpo.trainer import GRPOTrainer as TRLTrainer

    def run(trainer: type, name: str, given: dict[str, Any], **options: Any) -> Callable[..., Any]:
        return lambda *inputs: call(trainer, name, given, *inputs, KEPT, batch_size=2, **options)

    scored, bonus = {"compute_entropy": True}, {"model_kwarg_keys": (), "_entropy_bonus_enabled": True}
    return {
        "synchronous": run(TRLTrainer, "_full_logits_logps", keeps, **scored),
        "with an entropy bonus": run(TRLTrainer, "_full_logits_logps", bonus, **scored),
        "asynchronous": run(AsyncGRPOTrainer, "_get_per_token_logps_and_entropies", keeps, **scored),
        "flattened": run(AsyncGRPOTrainer, "_get_per_token_logps_and_entropies_flattened", {}, **scored),
    }


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_way_of_scoring_gives_the_hosts_results_and_gradients(
    adapter, methods, small_model, rng, monkeypatch, family
):
    capped = {"head_dim": 8, "final_logit_softcapping": 2.0} if family == "gemma2" else {}
    model = small_model(family, attn_implementation="eager", **capped)
    ids, mask = torch.randint(2, 53, (3, 9), generator=rng), torch.ones(3, 9, dtype=torch.long)
    mask[1, 7:] = 0
    weights = torch.randn(3, KEPT, generator=rng)
    # Axolotl scores under bfloat16, whose rounding would hide a wrong token.
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device_type, **_: autocast(device_type, enabled=False))

    def evaluate(score: Callable[..., Any]) -> list[Tensor]:
        logprobs, entropies = score(model, ids, mask)
        weight = weights[: len(logprobs)] * mask[: len(logprobs), -KEPT:]
        loss = (weight * logprobs).sum()
        if entropies.requires_grad and "bonus" in name:
            loss = loss + (weight * entropies).sum()
        gradients = torch.autograd.grad(loss, model.parameters())
        return [logprobs * weight, entropies.detach() * weight, *gradients]

    for name, score in methods.items():
        adapter.unpatch()
        expected = evaluate(score)
        adapter.patch()
        with logits_of(model) as widths:
            torch.testing.assert_close(evaluate(score), expected, rtol=1e-4, atol=1e-5, msg=name)
        assert 53 not in widths, name
    adapter.unpatch()


def test_axolotls_trainer_logs_the_same_numbers_of_each_step(model_folder, monkeypatch):
    trainers = pytest.importorskip("axolotl.core.trainers.grpo.trainer")
    from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig
    from words import differences, train_words

    monkeypatch.setattr("trl.GRPOConfig", AxolotlGRPOConfig)

    from grpo_fast.integrations import axolotl

    expected = train_words(trainers.AxolotlGRPOTrainer, model_folder, "grpo", 3)
    axolotl.patch()
    found = train_words(trainers.AxolotlGRPOTrainer, model_folder, "grpo", 3)
    axolotl.unpatch()
    apart = differences(found, expected)
    assert max(apart.values()) < 2e-5, apart
