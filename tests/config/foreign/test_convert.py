"""Foreign configurations: every key in the account, the right places, an outcome that loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_fast.config.convert import convert, convert_file
from grpo_fast.config.foreign.conversion import Conversion
from grpo_fast.config.foreign.names import NAMES
from grpo_fast.config.keys import ConfigError

LEFT = ("not applicable", "needs a decision")


def converted(text: str) -> Conversion:
    conversion = convert(yaml.safe_load(text))
    assert all(row.reason for row in conversion.rows if row.outcome in LEFT)
    return conversion


def check_places(conversion: Conversion, expected: dict[str, Any]) -> None:
    """`...` stands for a place that is not set."""
    assert {place: conversion.places.get(place, ...) for place in expected} == expected


def test_nemo_rls_one_section_form_takes_both_its_own_and_the_common_names():
    text = "algorithm: {name: grpo, num_generations_per_prompt: 4, ratio_clip_min: 0.1, beta: 0.02, odd: 1}\n"
    text += "policy: {model_name: a/b}"
    expected = {"rollout.num_generations": 4, "loss.epsilon_low": 0.1, "loss.beta": 0.02}
    expected |= {"loss.sampler_correction": "none"}  # a missing key's
    check_places(converted(text), expected)
    assert "algorithm.odd" in converted(text).open


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {name: dpo, beta: 0.2, loss_type: ipo}\npolicy: {model_name: a/b}",
        "dpo: {reference_policy_kl_penalty: 0.2}\npolicy: {model_name: a/b}",
        "base_model: a/b\nrl: dpo\nrl_beta: 0.2\ntrl: {max_completion_length: 9}",
        "{beta: 0.2, loss_type: [sigmoid], truncation_mode: keep_start, model_name_or_path: a/b}",
    ],
)
def test_preference_terms_are_not_taken_for_grpos(text):
    found = converted(text)
    check_places(found, {"algorithm": "dpo", "preference.loss.beta": 0.2})
    assert not any(place.split(".")[0] in ("loss", "rollout", "rewards") for place in found.places)


def test_keys_that_disagree_are_listed_and_tokens_are_not_shown():
    found = converted("{num_generations: 8, bf16: true, dtype: float32, hub_token: hf_secret}")
    reasons = {row.key: row.reason for row in found.rows}
    assert "model.dtype" in reasons["dtype"] and "bf16" in reasons["dtype"]
    assert "hf_secret" not in found.listing()


def test_a_nemo_rl_file_inherits_from_the_one_beside_it(tmp_path: Path):
    parent = "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\npolicy: {model_name: a/b}\n"
    (tmp_path / "parent.yaml").write_text(parent, encoding="utf-8")
    child = tmp_path / "child.yaml"
    child.write_text("defaults: parent.yaml\ngrpo: {num_generations_per_prompt: 8}\n", encoding="utf-8")
    check_places(convert_file(child)[0], {"rollout.num_generations": 8, "prompts_per_step": 32})


LONG = ", ".join(f"a{n}: ['${{policy.a{n - 1}}}', '${{..a{n - 1}}}']" for n in range(1, 60))
DEEP = "grpo: {a999: 1, " + ", ".join(f"a{n}: '${{grpo.a{n + 1}}}'" for n in range(999)) + "}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{policy: {a: '${grpo.b}'}, grpo: {b: '${policy.a}'}}", "policy.a: .* lead back to themselves"),
        ("grpo: {b: ['${grpo.b}'], c: '${grpo.b}'}", "grpo.b: .* lead back to themselves"),
        ("{grpo: {b: '${policy}'}, policy: {a: {c: '${grpo.b}'}}}", "lead back to themselves"),
        (DEEP, "grpo.a0: references are nested too deeply"),
        (f"{{grpo: {{a0: x}}, policy: {{a0: x, {LONG}}}}}", "are more than 10,000"),
        ("{defaults: [b.yaml, a.yaml], grpo: {b: 1}}", "defaults: a.yaml is among its own defaults"),
    ],
)
def test_references_without_end_are_refused_by_their_place(tmp_path: Path, text, says):
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("grpo: {c: 1}")
    with pytest.raises(ConfigError, match=says):
        convert_file(tmp_path / "a.yaml")


def test_references_of_nemo_rl_resolve_and_others_stay_as_written(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = converted("""
policy:
  {model_name: a/b, max_total_sequence_length: 512, train_micro_batch_size: 4,
   sequence_packing: {enabled: true,
     train_mb_tokens: "${mul:${..max_total_sequence_length}, ${..train_micro_batch_size}}"},
   generation: {temperature: 0.5, val_temperature: "${.temperature}", top_p: "${oc.env:HF_TOKEN}"}}
grpo: {max_num_steps: "${grpo.max_num_steps}"}
checkpointing: {checkpoint_dir: "${no.where}"}
""")
    check_places(found, {"micro_batch_tokens": 2048, "evaluation.temperature": 0.5, "rollout.top_p": ...})
    asked = {"policy.generation.top_p", "grpo.max_num_steps", "checkpointing.checkpoint_dir"}
    assert asked <= {*found.open} and "hf_secret" not in found.listing()


def test_trls_text_prompts_stay_text(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("{model_name_or_path: a/b, dataset_name: a/c, max_steps: 3}")
    conversion, text = convert_file(tmp_path / "a.yaml")
    assert yaml.safe_load(text)["dataset"]["chat"] == "messages"
    assert "text prompts = 'sent as they are' -> dataset.chat (TRL's default)" in conversion.listing()


@pytest.mark.parametrize("name", ["GRPOConfig", "DPOConfig"])
def test_every_field_of_the_real_trl_is_in_the_table_and_in_the_account(name, tmp_path):
    trl = pytest.importorskip("trl")
    names = {field.name for field in dataclasses.fields(getattr(trl, name))}
    assert names <= set(NAMES)
    path = tmp_path / "trl.json"
    config = getattr(trl, name)(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")

    rows = convert_file(path)[0].rows

    assert set(config.to_dict()) <= {row.key for row in rows}
