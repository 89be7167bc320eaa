"""Prompts with images: packed against the model's own forward, what trains, and what is written."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.policy import LoraConfig, ModelConfig
from grpo_fast.data.dataset import prompts_of
from grpo_fast.data.images import ImageReader
from grpo_fast.data.table import CompletionTable
from grpo_fast.policy import load_policy, pack
from grpo_fast.policy.experts import balance_loss
from tests.vision_models import CONFIGS, IMAGE_ID, OfGemma4, picture, save_vision_model

KINDS = sorted(CONFIGS)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def load(folder, **changes):
    policy = load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu", **changes))
    if policy.base_model.config.model_type == "gemma4":
        policy.image_reader = ImageReader(lambda: OfGemma4(folder), policy.image_reader.files)
    return policy


def questions(policy):
    """Two images, one, one more with the same text, and none."""
    rows = [
        {"prompt": [{"role": "user", "content": "how many"}], "images": [picture(64, 64), picture(90, 40)]},
        {"prompt": "how many shapes", "image": picture(40, 64)},
        {"prompt": "how many shapes", "image": picture(40, 64)},
        {"prompt": "how many shapes", "image": None},
    ]
    return prompts_of(rows, DatasetConfig(source="rows"), policy.tokenizer, images=policy.image_reader)


def completions_of(dataset):
    owners = [0, 0, 1, 1, 2, 3]
    words = [torch.randint(IMAGE_ID + 3, 60, (length,)).tolist() for length in (2, 30, 1, 4, 9, 3)]
    return CompletionTable.of(
        [dataset[owner].token_ids for owner in owners],
        words,
        owners,
        objects={"images": [dataset[owner].images for owner in owners]},
    )


def own_logprobs(policy, table):
    """(N,) by the model's own forward of each sequence alone, tower and all."""
    found, model = [], policy.base_model
    for row in range(len(table)):
        prompt, own = table.prompt_of(row), table.tokens_of(row)
        given = {}
        if (images := table.objects["images"][row]) is not None:
            given = {**policy.vision.reader.inputs(images)}
            assert torch.equal(given.pop("input_ids")[0], prompt)
            given.pop("attention_mask", None)
            of_images = torch.cat([prompt == IMAGE_ID, torch.zeros(len(own), dtype=torch.bool)]).long()[None]
            name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
            given.pop("num_soft_tokens_per_image", None)
            given[name] = of_images
        ids = torch.cat([prompt, own])[None]
        logits = model(input_ids=ids, **given, use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).gather(1, own[:, None])[:, 0])
    return torch.cat(found)


def packed_logprobs(policy, table, max_tokens):
    found = torch.zeros(len(table.token_ids))
    for batch in pack(table, max_tokens=max_tokens, device="cpu"):
        logprobs = policy.head.logits(policy.hidden_states(batch)).log_softmax(-1)
        found = found.index_put((batch.token_index,), logprobs.gather(1, batch.targets[:, None])[:, 0])
    return found


def test_packed_images_have_the_models_own_logprobs_and_gradients(folder):
    policy = load(folder)
    table = completions_of(questions(policy))
    own = own_logprobs(policy, table)
    weights = torch.randn(len(own))
    trained = policy.trainable()
    right = torch.autograd.grad((own * weights).sum(), [*trained.values()], allow_unused=True)
    for max_tokens in (10_000, 60):
        packed = packed_logprobs(policy, table, max_tokens)
        torch.testing.assert_close(packed, own, atol=1e-5, rtol=0)
        found = torch.autograd.grad((packed * weights).sum(), [*trained.values()], allow_unused=True)
        for name, one, other in zip(trained, found, right, strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                torch.testing.assert_close(
                    one, other, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.drawn(3)
def test_the_tower_looks_once_at_a_prompt_and_is_neither_trained_nor_adapted(folder):
    policy = load(folder, lora=LoraConfig(r=2), gradient_checkpointing=True)
    names = [name for name, _ in policy.model.named_parameters() if "lora_" in name]
    assert names and all("language_model" in name for name in names)
    full = load(folder)
    assert all("language_model" in name or "lm_head" in name for name in full.trainable())
    looks = []
    backbone = policy.base_model.base_model
    tower = getattr(backbone, "visual", None) or backbone.vision_tower
    tower.register_forward_hook(lambda *_: looks.append(0))
    table = completions_of(questions(policy))
    for max_tokens in (10_000, 60):
        packed_logprobs(policy, table, max_tokens).sum().backward()
    assert len(looks) == 3
    assert all(adapter.grad is not None for adapter in policy.trainable().values())


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_a_mixture_that_sees_images_has_its_own_balance(kind, tmp_path):
    policy = load(save_vision_model(tmp_path, kind), router_aux_loss=0.1)
    ids = torch.randint(IMAGE_ID + 3, 60, (9,)).tolist()
    (batch,) = pack(CompletionTable.of([ids[:5]], [ids[5:]]), max_tokens=100, device="cpu")
    routed = []
    policy.hidden_states(batch, routed=routed)
    model = policy.base_model
    own = model(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True, use_cache=False)
    torch.testing.assert_close(balance_loss(model, routed), own.aux_loss)


def test_features_used_longest_ago_make_room(folder, monkeypatch):
    policy = load(folder)
    first, second, third = (prompt.images for prompt in questions(policy)[:3])
    assert first and second and third
    kept = policy.vision.of(second), policy.vision.of(third)
    room = 2 * kept[0].features.nbytes * (1 + len(kept[0].deep))
    monkeypatch.setattr("grpo_fast.policy.vision.KEPT_BYTES", room)
    policy.vision.of(second)
    policy.vision.of(first)
    assert policy.vision.of(first) is policy.vision.of(first)
    assert policy.vision.of(third) is not kept[1]
    assert torch.equal(policy.vision.of(third).features, kept[1].features)


@pytest.mark.drawn(3)
def test_a_written_model_has_its_tower_and_its_processor(folder, tmp_path):
    policy = load(folder, lora=LoraConfig(r=2))
    for adapter in policy.trainable().values():
        torch.nn.init.normal_(adapter, std=0.1)
    table = completions_of(questions(policy))
    policy.save_pretrained(tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / name).is_file() == (folder / name).is_file()
        assert not (folder / name).is_file() or (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    written = load(tmp_path)
    assert [*written.base_weights()] == [*load(folder).base_weights()]
    one, other = (packed_logprobs(found, table, 10_000) for found in (policy, written))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
