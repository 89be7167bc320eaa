"""A patched transformers model gives the loss and the gradients of the unpatched one, and no logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from grpo_fast.integrations.huggingface import patch_causal_lm, unpatch_causal_lm

# transformers rounds the logits of a float64 model to float32 for its loss; ours stay float64.
HOST_IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL | {"tie_word_embeddings": False} | options)).double()


MODELS = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "gemma2 softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0, attn_implementation="eager")
    ).double(),
    "cohere scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)).double(),
    "granite scaling": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)).double(),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    ).double(),
    "mixtral with auxiliary loss": lambda: MixtralForCausalLM(
        MixtralConfig(**SMALL, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5)
    ),  # its experts have no float64 product
}


@pytest.fixture
def batch(rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Right-padded, a prompt that is not trained on, and one sequence without any target."""
    ids = torch.randint(2, 61, (4, 9), generator=rng)
    lengths = torch.randint(4, 10, (4, 1), generator=rng)
    mask = torch.arange(9) < lengths
    labels = ids.masked_fill(~mask | (torch.arange(9) < 2), -100)
    labels[1] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_full_logits(name: str, batch: dict[str, Any]) -> None:
    torch.manual_seed(int(batch["input_ids"].sum()))
    model = MODELS[name]().eval()
    for extra in ({}, {"num_items_in_batch": torch.tensor(29)}):
        expected = loss_and_gradients(model, batch | extra)

        found = loss_and_gradients(patch_causal_lm(model), batch | extra)
        unpatch_causal_lm(model)

        torch.testing.assert_close(found, expected, **HOST_IN_FLOAT32)


def test_no_tensor_of_vocabulary_width_is_formed(batch: dict[str, Any]) -> None:
    seen: list[torch.Size] = []
    model = patch_causal_lm(llama())
    model.lm_head.register_forward_hook(lambda _m, _a, out: seen.append(out["loss"].shape))
    output = model(**batch)
    assert output.logits is None and "logits" not in output
    assert seen == [torch.Size([])]
    assert model.get_output_embeddings() is model.lm_head and "get_output_embeddings" not in vars(model)


def test_logits_come_on_request(batch: dict[str, Any]) -> None:
    model = llama().eval()
    expected = model(**batch).logits.float()
    output = patch_causal_lm(model, logits=True)(**batch)
    torch.testing.assert_close(output.logits, expected)
    assert not output.logits.requires_grad


def test_a_tuple_output_loses_its_logits_only(batch: dict[str, Any]) -> None:
    model = llama().eval()
    expected = model(**batch, return_dict=False)
    found = patch_causal_lm(model)(**batch, return_dict=False)
    torch.testing.assert_close(found[0], expected[0], **HOST_IN_FLOAT32)
    assert len(found) == len(expected) - 1


def test_labels_already_shifted_are_not_shifted_again(batch: dict[str, Any]) -> None:
    model = llama().eval()
    batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    expected = model(**{**batch, "shift_labels": None}).loss
    torch.testing.assert_close(patch_causal_lm(model)(**batch).loss, expected, **HOST_IN_FLOAT32)


def test_a_call_without_labels_returns_logits(batch: dict[str, Any]) -> None:
    model = llama().eval()
    ids = batch["input_ids"]
    expected = model(ids).logits
    torch.testing.assert_close(patch_causal_lm(model)(ids).logits, expected)
    assert model.generate(ids[:, :4], max_new_tokens=2, do_sample=False).shape[1] <= 6


def test_a_batch_without_targets_still_reaches_every_parameter(batch: dict[str, Any]) -> None:
    model = patch_causal_lm(llama())
    batch["labels"] = torch.full_like(batch["labels"], -100)
    found = loss_and_gradients(model, batch | {"num_items_in_batch": 7})
    assert set(found) == {"loss", *dict(model.named_parameters())}
    assert all(not value.any() for value in found.values())


def test_unpatching_restores_the_model_and_patching_twice_is_refused(batch: dict[str, Any]) -> None:
    model = llama()
    before = set(vars(model))
    patch_causal_lm(model)
    with pytest.raises(ValueError, match="patched already"):
        patch_causal_lm(model)
    unpatch_causal_lm(model)
    assert set(vars(model)) == before
    assert model(**batch).logits is not None
    with pytest.raises(ValueError, match="not patched"):
        unpatch_causal_lm(model)


def test_a_wrapper_put_around_the_patch_survives_unpatching(batch: dict[str, Any]) -> None:
    model = patch_causal_lm(llama())
    inner = model.forward
    model.forward = lambda **kwargs: inner(**kwargs)
    outer = model.forward
    unpatch_causal_lm(model)
    assert model.forward is outer
    assert model(**batch).logits is not None


def test_lora_adapters_train_under_the_patch(batch: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    expected = loss_and_gradients(model, batch)
    found = loss_and_gradients(patch_causal_lm(model), batch)
    torch.testing.assert_close(found, expected, **HOST_IN_FLOAT32)


def test_what_is_no_causal_language_model_is_refused() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        patch_causal_lm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="output head"):
        patch_causal_lm(llama().model)


def test_logits_to_keep_beside_labels_is_refused(batch: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="logits_to_keep"):
        patch_causal_lm(llama())(**batch, logits_to_keep=2)


def test_the_trainer_reaches_the_same_weights(rng: torch.Generator, tmp_path: Path) -> None:
    torch.manual_seed(int(torch.randint(2**31, (), generator=rng)))
    model = llama().float()
    rows = [{"input_ids": torch.randint(2, 61, (n,), generator=rng)} for n in (5, 9, 7, 8, 6, 5, 9, 4)]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    options |= {"max_steps": 2, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trained = []
    for prepare in (lambda m: m, patch_causal_lm):
        one = prepare(copy.deepcopy(model))
        arguments = TrainingArguments(str(tmp_path), **options)
        trainer = Trainer(one, arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        trained.append((trainer.state.log_history[-1]["train_loss"], one.state_dict()))
    (expected_loss, expected), (loss, found) = trained
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def test_two_processes_under_ddp_and_fsdp2_give_the_gradients_of_one(run_worker: Callable[..., None]) -> None:
    run_worker("huggingface_worker.py")


def test_the_example_runs_as_it_stands(run_example: Callable[[str], Any]) -> None:
    _, printed = run_example("huggingface_sft")
    assert "'loss'" in printed
