"""A patched transformers model gives the loss and the gradients of the unpatched one, and no logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Trainer, TrainingArguments

from grpo_fast.head import HeadParameters
from grpo_fast.integrations.huggingface import patch_causal_lm, unpatch_causal_lm

# transformers rounds the logits of a float64 model to float32 for its loss; ours stay float64.
HOST_IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "tied llama": {"tie_word_embeddings": True},
    "gemma2": {},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 4.0},
    "gpt2": {},
    "mixtral": {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}


@pytest.fixture
def tiny(small_model: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    def make(name: str = "llama") -> PreTrainedModel:
        model = small_model(name.split()[-1], **MODELS[name])
        return model if name == "mixtral" else model.double()  # its experts have no float64 product

    return make


@pytest.fixture
def batch(rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Right-padded, a prompt that is not trained on, and one sequence without any target."""
    ids = torch.randint(2, 53, (4, 9), generator=rng)
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
def test_loss_and_gradients_are_those_of_the_full_logits(tiny, name, batch):
    torch.manual_seed(int(batch["input_ids"].sum()))
    model, shapes = tiny(name).eval(), []
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    for extra, same in (({}, {"shift_labels": shifted}), ({"num_items_in_batch": torch.tensor(29)}, {})):
        expected = loss_and_gradients(model, batch | extra)

        patch_causal_lm(model)
        record = lambda _module, _inputs, output: shapes.append(output.shape)  # noqa: E731
        with model.get_output_embeddings().register_forward_hook(record):
            found = loss_and_gradients(model, batch | extra | same)
        unpatch_causal_lm(model)

        torch.testing.assert_close(found, expected, **HOST_IN_FLOAT32)
    assert {*shapes} == {torch.Size([])}  # the loss: no tensor is as wide as the vocabulary


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_all_but_the_logits_is_returned(tiny, name, batch, as_tuple):
    model = tiny(name).eval()
    options = {**batch, "return_dict": not as_tuple, "output_hidden_states": True}
    expected = model(**options)
    found = patch_causal_lm(model)(**options)

    assert len(found) == len(expected) - 1
    torch.testing.assert_close(found[0], expected[0], **HOST_IN_FLOAT32)
    torch.testing.assert_close(found[-1], expected[-1])
    assert all(one.dim() == 0 or one.shape[-1] for one in found if isinstance(one, torch.Tensor))


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "checkpointed": lambda model: model,
    "checkpointed, reentrant": lambda model: model,
    "checkpointed as a whole": lambda model: partial(checkpoint, model, use_reentrant=False),
    "DDP": DistributedDataParallel,
    "DDP, compiled": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
    "accelerate": lambda model: Accelerator(cpu=True).prepare(model),
    "LoRA": lambda model: model,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_inside_a_wrapper_are_those_of_the_full_logits(tiny, batch, wrapper, tmp_path):
    model = tiny().train()
    if wrapper == "LoRA":
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    model.config.use_cache = False
    expected = loss_and_gradients(model, batch)
    del expected["loss"]
    patch_causal_lm(model)
    if wrapper in ("checkpointed", "checkpointed, reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in wrapper})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model.zero_grad()
        WRAPPERS[wrapper](model)(**batch).loss.backward()
    finally:
        dist.destroy_process_group()

    found = {name: of.grad for name, of in model.named_parameters() if of.grad is not None}
    torch.testing.assert_close(found, expected, **HOST_IN_FLOAT32)


@pytest.mark.parametrize("mode", ["plain", "bf16", "compiled"])
def test_compute_metrics_alone_makes_a_trainer_form_logits(tiny, batch, tmp_path, mode, monkeypatch):
    model, seen, formed = tiny().to(torch.float32 if mode == "bf16" else torch.float64), [], []
    options = {"torch_compile_backend": "aot_eager"} if mode == "compiled" else {"bf16": mode == "bf16"}
    arguments = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, per_device_eval_batch_size=2, **options
    )
    logits = HeadParameters.logits
    monkeypatch.setattr(HeadParameters, "logits", lambda *given: formed.append(given) or logits(*given))
    rows = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"]]

    def metrics(given: Any) -> dict[str, float]:
        return seen.append(torch.from_numpy(given.predictions)) or {}

    for patch in (lambda model: model, patch_causal_lm):
        torch.compiler.reset()
        Trainer(patch(model), arguments, eval_dataset=rows, compute_metrics=metrics).evaluate()

    torch.testing.assert_close(*seen)
    before = len(formed)
    assert before == 2 or mode == "compiled"  # where the model may form its own
    Trainer(model, arguments, eval_dataset=rows).evaluate()
    assert len(formed) == before


@pytest.mark.parametrize("name", MODELS)
def test_logits_that_are_read_in_evaluation_are_the_models(tiny, name, batch):
    model = tiny(name).eval()
    with torch.no_grad():
        expected = model(**batch)
        found, as_tuple = patch_causal_lm(model)(**batch), model(**batch, return_dict=False)

    torch.testing.assert_close(found.loss, expected.loss, **HOST_IN_FLOAT32)
    assert list(found) == list(expected)
    assert found.logits.shape == expected.logits.shape and found.logits.dtype == expected.logits.dtype
    place = list(found).index("logits")
    for logits in (found.logits, found["logits"], found[place], as_tuple[place]):
        torch.testing.assert_close(logits[:, -1], expected.logits[:, -1])
        torch.testing.assert_close(torch.from_numpy(logits.float().numpy()), expected.logits.float())


@pytest.mark.parametrize("what", ["changed", "freed"])
@torch.no_grad()
def test_logits_are_not_formed_from_a_weight_that_has_changed(tiny, batch, what):
    model = patch_causal_lm(tiny().eval())
    read, unread = model(**batch).logits, model(**batch).logits
    expected, weight = read.clone(), model.lm_head.weight

    if what == "changed":
        weight.add_(1)
    else:
        weight.untyped_storage().resize_(0)

    assert torch.equal(read, expected)
    with pytest.raises(RuntimeError, match=f"{what}.*read them earlier"):
        unread.argmax(-1)


def test_a_batch_without_targets_still_reaches_every_parameter(tiny, batch):
    model = patch_causal_lm(tiny())
    batch["labels"] = torch.full_like(batch["labels"], -100)
    found = loss_and_gradients(model, batch | {"num_items_in_batch": 7})
    assert found.keys() == {"loss", *dict(model.named_parameters())}
    assert not any(value.any() for value in found.values())
    assert model(batch["input_ids"]).logits.shape == (4, 9, 53)  # of a call without labels


@pytest.mark.parametrize("wrapped", [False, True])
def test_unpatching_leaves_the_model_and_a_wrapper_around_it(tiny, batch, wrapped):
    model = tiny()
    before = set(vars(model))
    with pytest.raises(ValueError, match="patched already"):
        patch_causal_lm(patch_causal_lm(model))
    if wrapped:
        model.forward = outer = partial(model.forward)
    unpatch_causal_lm(model)
    assert model.forward is outer if wrapped else set(vars(model)) == before
    assert model(**batch).logits is not None
    with pytest.raises(ValueError, match="not patched"):
        unpatch_causal_lm(model)


def test_what_is_no_causal_language_model_or_call_of_one_is_refused(tiny, batch):
    with pytest.raises(TypeError, match="got Linear"):
        patch_causal_lm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="output head"):
        patch_causal_lm(tiny().model)
    model = patch_causal_lm(tiny())
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(**batch, logits_to_keep=2)
    assert [dict(vars(module)) for module in model.modules()] == before
