from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_fast.plan.model_shape import model_shape, skeleton
from grpo_fast.plan.shapes import SHAPES, architecture, model_config
from grpo_fast.policy.config import ModelConfig

PUBLISHED = {  # parameters of the published weights, a tied head counted once
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.1-8B": 8_030_261_248,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = model_shape(skeleton(architecture(name), ModelConfig(path="-")))

    assert shape.total == PUBLISHED[name]


def test_a_name_is_found_in_any_case() -> None:
    assert architecture("qwen2.5-0.5b").hidden_size == architecture("Qwen2.5-0.5B").hidden_size


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'Qwen9' is not a shape known here; known are SmolLM2-135M, Qwen2.5"
    ):
        architecture("Qwen9")


def test_a_configuration_file_is_enough(tmp_path: Path) -> None:
    architecture("SmolLM2-135M").save_pretrained(tmp_path)

    for source in (tmp_path, tmp_path / "config.json"):
        assert model_config(str(source)).hidden_size == 576


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match="no configuration that can be read"):
        model_config(str(tmp_path))

    assert not marker.exists()


def test_what_cannot_be_read_is_answered_with_what_can(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a folder or a config\.json.*Llama-3\.1-8B"):
        model_config(str(tmp_path / "absent"))


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_makes_a_configuration(name: str) -> None:
    assert architecture(name).num_hidden_layers > 0
