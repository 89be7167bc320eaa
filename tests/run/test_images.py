"""What does not go with images is refused before a weight is read; answers of a trained model see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import grpo_fast
from grpo_fast.config.schema import TrainConfig
from grpo_fast.distributed.world import World
from grpo_fast.examples import count_shapes
from grpo_fast.run.build import require_packed_and_whole
from tests.vision_models import save_vision_model


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(count_shapes.save_random_model(tmp_path / "model"))},
        "dataset": count_shapes.pictures(4, seed=1),
        "rewards": count_shapes.correct,
        "max_steps": 1,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 2,
        "micro_batch_tokens": 1024,
        "logging.tensorboard": False,
        "output_dir": str(tmp_path / "run"),
        "display": False,
    }


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_fast.run.build.load_policy", lambda *_, **__: pytest.fail("weights were read"))


def test_preferences_with_images_are_refused(settings: dict[str, Any], no_weights: None) -> None:
    for name in ("rewards", "num_generations", "max_completion_length"):
        del settings[name]
    pairs = [row | {"chosen": "one", "rejected": "two"} for row in settings["dataset"]]
    with pytest.raises(ValueError, match=r"algorithm = 'dpo' trains on text, and rows of .* have images"):
        grpo_fast.train(**settings | {"algorithm": "dpo", "dataset": pairs})


def test_images_that_vllm_cannot_attend_to_are_refused(settings, no_weights, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_fast.rollout.vllm.kind.require_vllm", lambda: None)
    monkeypatch.setattr("grpo_fast.rollout.vllm.settings.find_spec", lambda name: name)
    settings["model"] = {"path": str(save_vision_model(tmp_path / "gemma3", "gemma3")), "device": "cpu"}
    with pytest.raises(ValueError, match=r"gemma3 in both directions: set rollout\.engine"):
        grpo_fast.train(**settings | {"rollout.engine": "vllm"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distributed": {"mode": "shard"}}, r"distributed\.mode = 'shard' divides the vision tower"),
        ({"model": {"path": "m", "packing": "none"}}, r"model\.packing = 'none' computes no prompts"),
    ],
)
def test_settings_that_do_not_support_images_are_refused(changes: dict[str, Any], said: str) -> None:
    sections = {"model": {"path": "m"}, "dataset": {"source": "d"}, "rewards": [{"reward": "length"}]}
    world = World.__new__(World)
    world.size = 2
    with pytest.raises(ValueError, match=said):
        require_packed_and_whole(TrainConfig(**sections | changes), world)


def test_a_trained_model_answers_prompts_with_images(settings: dict[str, Any]) -> None:
    run = grpo_fast.train(**settings)
    one, other = (row["image"] for row in count_shapes.pictures(2, seed=7))
    text = {"type": "text", "text": "how many"}
    asked = [
        [{"role": "user", "content": [{"type": "image", "image": image}, text]}]
        for image in (one, other, one)
    ]
    answers = run.policy.generate(asked, max_completion_length=1)
    assert answers[0] == answers[2] and answers[0].logprobs != answers[1].logprobs
