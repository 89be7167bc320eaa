"""Trainers derived from TRL's that score logits: the same log-probabilities, entropies and gradients without.

The real Axolotl and ms-swift run here where they are installed with the TRL that they pin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_stubs import assert_unchanged_by_patch, loaded, with_gradients
from torch import Tensor, nn
from words import assert_same_history, train_words

from grpo_fast.integrations.host import unwrapped

KEPT = 5
STATE = {
    "temperature": 0.7,
    "accelerator": SimpleNamespace(unwrap_model=lambda model, **_: model, is_main_process=True),
    "is_fsdp_enabled": False,
    "use_liger_kernel": False,
    "_entropy_bonus_enabled": False,
    "template": SimpleNamespace(padding_free=False),
}
KEEPS = {"model_kwarg_keys": ("logits_to_keep",)}
BONUS = {"model_kwarg_keys": (), "_entropy_bonus_enabled": True}
FREE = {"model_kwarg_keys": (), "template": SimpleNamespace(padding_free=True)}


@pytest.fixture(params=["axolotl", "swift"])
def relative(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with loaded(request.param) as host:
        yield host


def scorers(relative: SimpleNamespace) -> dict[str, Callable[..., Any]]:
    """Return what computes (log-probabilities, entropies) of a host's trainer, by its name."""

    def call(trainer: type, name: str, given: dict[str, Any], *args: Any, **options: Any) -> Any:
        method = getattr(trainer, name)  # looked up here, patched or not
        return method(SimpleNamespace(**STATE | given), *args, **options)[:2]

    if relative.adapter.__name__.endswith("swift"):
        from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

        def local(model: nn.Module, ids: Tensor, mask: Tensor, given: dict[str, Any]) -> Any:
            inputs = {"input_ids": ids, "attention_mask": mask}
            return call(GRPOTrainer, "_get_logps_via_local_forward", given, model, inputs, KEPT, ids, True)

        return {
            "padded": lambda *inputs: local(*inputs, KEEPS),
            "padding-free": lambda model, *rows: local(model, *(of.reshape(1, -1) for of in rows), FREE),
        }
    from axolotl.core.trainers.grpo.async_trainer import AsyncGRPOTrainer
    from axolotl.core.trainers.grpo.trainer import GRPOTrainer as TRLTrainer

    def run(trainer: type, name: str, given: dict[str, Any]) -> Callable[..., Any]:
        options = {"batch_size": 2, "compute_entropy": True}
        return lambda *inputs: call(trainer, name, given, *inputs, KEPT, **options)

    scored = "_get_per_token_logps_and_entropies"
    return {
        "synchronous": run(TRLTrainer, "_full_logits_logps", KEEPS),
        "with an entropy bonus": run(TRLTrainer, "_full_logits_logps", BONUS),
        "asynchronous": run(AsyncGRPOTrainer, scored, KEEPS),
        "flattened": run(AsyncGRPOTrainer, f"{scored}_flattened", {}),
    }


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_way_of_scoring_gives_the_hosts_results_and_gradients(
    relative, small_model, rng, monkeypatch, family
):
    model = small_model(family, attn_implementation="eager")
    ids, mask = torch.randint(2, 53, (3, 9), generator=rng), torch.ones(3, 9, dtype=torch.long)
    mask[1, 7:] = 0
    # Axolotl scores under bfloat16, whose rounding would hide a wrong token.
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device_type, **_: autocast(device_type, enabled=False))
    widths: list[int] = []
    head = unwrapped(model).get_output_embeddings()

    for name, score in scorers(relative).items():

        def evaluate(score: Any = score, name: str = name) -> list[Tensor]:
            logprobs, entropies = score(model, ids, mask)
            live = mask[: len(logprobs), -KEPT:]
            entropies = entropies if "bonus" in name else entropies.detach()
            return with_gradients([logprobs * live, entropies * live], model.parameters())

        relative.adapter.unpatch()
        assert_unchanged_by_patch(relative, evaluate, rtol=1e-4, atol=1e-5)
        with head.register_forward_hook(lambda _, inputs, output: widths.append(output.shape[-1])):
            evaluate()
        assert 53 not in widths, name


def test_axolotls_trainer_logs_the_same_numbers_of_each_step(model_folder, monkeypatch):
    with loaded("axolotl") as axolotl:
        from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig
        from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

        monkeypatch.setattr("trl.GRPOConfig", AxolotlGRPOConfig)
        expected = train_words(AxolotlGRPOTrainer, model_folder, "grpo", 3)
        axolotl.adapter.patch()
        assert_same_history(train_words(AxolotlGRPOTrainer, model_folder, "grpo", 3), expected)
