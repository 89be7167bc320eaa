"""Configuration files: what is accepted, what is refused, and what the person is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.evaluation import EvaluationConfig
from grpo_fast.config.foreign.names import ABSENT, MOVED
from grpo_fast.config.keys import REMOVED, ConfigError, keys
from grpo_fast.config.load import dump_config, load_config
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked, masked_command
from grpo_fast.config.tree import differences, value_at, with_leaves
from grpo_fast.objective.catalog import LOSS_TYPES

MINIMAL_KEYS = ["model.path=m", "dataset.source=rows.jsonl"]
ALIAS_BOMB = "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MINIMAL = "model: {path: some/model}\ndataset: {source: rows.jsonl}\nrewards: [{reward: exact_match}]\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        file = tmp_path / "config.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def problems_of(path: Path, overrides: list[str] | dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value).count("\n") == len(caught.value.problems)  # one line each
    return {problem.name: str(problem) for problem in caught.value.problems}


def cases(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", cases("accepted.yaml"))
def test_files_overrides_and_flat_names_reach_their_places(write, case):
    text = case.get("whole", MINIMAL + case.get("file", ""))
    for overrides in case.get("sets", [[]]):
        config = load_config(write(text), overrides).model_dump(mode="json")
        assert {place: value_at(config, place) for place in case["places"]} == case["places"]


@pytest.mark.parametrize("case", cases("refused.yaml"), ids=lambda case: case["set"])
def test_a_wrong_setting_is_refused_by_its_key(write, case):
    overrides = re.split(r" (?=[\w.]+=)", case["set"])
    ((name, problem),) = problems_of(write(MINIMAL), overrides).items()
    assert name == case["key"] and all(words in problem for words in case.get("says", ()))
    assert "says" in case or len(problem) > 40  # it says what to do


def test_every_key_is_described_and_every_whole_number_bounded():
    for name, schema in keys().items():
        assert schema.get("description") or "$ref" in schema or "allOf" in schema, name
        for part in (schema, *schema.get("anyOf", ()), schema.get("items", {})):
            assert part.get("type") != "integer" or "maximum" in part, name


def test_every_problem_is_listed_at_once_with_its_place_and_value(write):
    text = (
        "model: {path: m, dtype: bfloat}\nrollout: {num_generations: 0}\nrewards: [{weight: 1}]\nfoo_bar: 3\n"
    )
    found = problems_of(write(text), ["optimizer.learning_rate=fast", "max_steps.x=1"])

    of_the_file = {"model.dtype", "rollout.num_generations", "rewards.0.reward", "dataset", "foo_bar"}
    assert set(found) == {*of_the_file, "optimizer.learning_rate", "max_steps"}
    assert "rollout.num_generations = 0: should be " in found["rollout.num_generations"]
    assert found["dataset"] == "dataset: is required"


@pytest.mark.parametrize(
    "case",
    [
        *cases("unreadable.yaml"),
        {"file": "a: \x01", "says": "cannot be read"},
        {"file": b"\xff\xfe\x00seed", "says": "cannot be read"},
        {"file": ALIAS_BOMB, "says": "1,000,000 values by its aliases"},
        {"file": "a: " + 5000 * "[", "says": "nested too deeply"},
        {"file": 10**5 * "[" + 10**5 * "]", "says": "nested too deeply", "name": "a.json"},
    ],
)
def test_what_holds_no_plain_mapping_or_assignment_is_refused(tmp_path, case):
    text, file = case.get("file", MINIMAL + case.get("add", "")), tmp_path / case.get("name", "a.yaml")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert case["says"] in str(problems_of(file, case.get("sets", [])))


def test_a_word_and_a_number_that_may_be_text_are_warned_of(write, caplog):
    load_config(write("rewards: [{reward: length, options: {a: yes, b: 1_0}}]"), MINIMAL_KEYS)
    assert all(f"rewards.0.options.{key}: line 1: YAML reads" in caplog.text for key in "ab")


def test_recipes_and_losses_survive_a_round_trip_and_any_length(write):
    configs = [load_config(recipe) for recipe in ("quickstart", "gsm8k", "distill", "dpo", "rank")]
    configs += [load_config(write(MINIMAL), [f"loss_type={loss_type}"]) for loss_type in LOSS_TYPES]
    for config in configs:
        path = write(dump_config(config))
        assert load_config(path) == load_config(path.parent) == config  # a run's directory stands for it
    for recipe in ("quickstart", "gsm8k", "distill", "dpo", "rank"):
        for steps in (1, 3, 1000):
            assert load_config(recipe, [f"max_steps={steps}"]).optimizer.warmup_steps < steps


@pytest.mark.parametrize(
    ("override", "correction"),
    [
        ("loss.loss_type=gspo", "sequence_mask"),
        ("loss.loss_type=vespo", "token_truncate"),
        ("old_logprobs=sampler", "none"),
        ("rollout.top_p=0.9", "none"),
        ("loss.loss_type=mine:loss", None),
    ],
)
def test_vllms_completions_are_corrected_where_nothing_forbids_it(write, override, correction):
    config = load_config(write(MINIMAL), [override])
    assert config.with_sampler(draws_with_policy=False).loss.sampler_correction == correction
    by_trainer = config.with_sampler(draws_with_policy=True).loss.sampler_correction
    assert by_trainer == (correction and "none")


def test_another_source_leaves_behind_what_only_the_old_one_reads():
    local = load_config("gsm8k", ["dataset.source=train.jsonl", "evaluation.dataset.source=test.jsonl"])
    assert (local.dataset.name, local.dataset.split, local.evaluation.dataset.split) == (
        None,
        "train",
        "train",
    )
    assert local.dataset.prompt_column == "question"
    with pytest.raises(ConfigError, match=r"dataset: split = 'test' is not read"):
        load_config("gsm8k", ["dataset.source=train.jsonl", "dataset.split=test"])


@pytest.mark.parametrize("as_objects", [False, True])
def test_held_out_rows_are_read_as_the_datasets_where_nothing_else_is_set(write, as_objects):
    dataset = {"source": "o/g", "name": "main", "prompt_column": "q", "system_prompt": "Think.", "size": 9}
    dataset |= {"examples": [("1", "2")], "max_prompt_length": 7, "chat": True, "rename": {"a": "answer"}}
    shape = {"model": {"path": "m"}, "rewards": [{"reward": "length"}], "dataset": dataset}

    def held_out(given: dict[str, Any]) -> dict[str, Any]:
        if as_objects:
            whole = {**shape, "dataset": DatasetConfig(**dataset)}
            config = TrainConfig(**whole, evaluation=EvaluationConfig(dataset=DatasetConfig(**given)))
        else:
            tree = with_leaves(shape | {"evaluation": {"dataset": given}}, lambda leaf: leaf)
            config = load_config(write(yaml.safe_dump(tree)))
        assert load_config(write(dump_config(config))) == config  # what a run saves means the same
        assert config.evaluation.dataset is not None
        return config.evaluation.dataset.model_dump()

    wrong = shape | {"evaluation": {"dataset": {"source": "o/g"}}}
    assert [*problems_of(write("{}"), wrong | {"dataset": dataset | {"chat": "no"}})] == ["dataset.chat"]
    whole = DatasetConfig(**dataset).model_dump()
    others = {"source": "test.jsonl", "system_prompt": None, "prompt_column": "question"}
    assert held_out(others) == whole | others | {"name": None, "size": None}
    assert held_out({"source": "o/g", "split": "test"}) == whole | {"split": "test", "size": None}
    if not as_objects:
        assert held_out({"split": "test"}) == whole | {"split": "test", "size": None}


TEXT = st.text([*map(chr, range(32, 127)), *"\x85\u00a0é€\u2028漢😀"], max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=8)
@given(
    options=st.dictionaries(TEXT, PLAIN, max_size=4),
    prompt=TEXT | st.sampled_from(["${A}", "???", "2020-01-02"]),
)
def test_any_plain_options_and_text_survive_a_round_trip(tmp_path_factory, options, prompt):
    base = {"source": "reasoning_gym:any", "options": options, "system_prompt": prompt}
    config = TrainConfig(model={"path": "m"}, dataset=base, rewards=[{"reward": "exact_match"}])
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")

    assert load_config(path) == config


def test_the_tables_of_names_lead_to_keys_that_exist_or_give_a_reason():
    places = {getattr(rule, "keywords", {}).get("to", rule) for rule in MOVED.values()}
    assert {place for place in places if isinstance(place, str) and place} <= {*keys()}
    assert not set(MOVED) & set(ABSENT) and not set(REMOVED) & {*keys()}


def test_a_runs_length_is_in_steps_or_in_epochs_and_the_command_line_wins(write):
    by_epochs = load_config(write(MINIMAL + "epochs: 2\noptimizer: {warmup_steps: 300}\n"))
    printed = yaml.safe_load(dump_config(by_epochs))
    assert printed["epochs"] == 2 and "max_steps" not in printed
    assert load_config(write(dump_config(by_epochs))) == by_epochs

    path = write(MINIMAL + "max_steps: 7\n")
    assert load_config(path, ["epochs=2"]).epochs == load_config(path, ["num_train_epochs=2"]).epochs == 2
    back = load_config(write(MINIMAL + "num_train_epochs: 2\n"), ["max_steps=100"])
    assert (back.epochs, back.max_steps) == (None, 100)


@pytest.mark.parametrize("case", cases("secrets.yaml"))
def test_what_is_secret_is_hidden_and_what_only_sounds_so_is_not(case):
    assert masked(case["written"]) == case.get("shown", case["written"])


def test_an_error_shows_no_secret_of_a_section_written_as_text_or_of_a_url(write):
    sections = (
        "'{reward: judge, options: {api_key: w7, n: 1}}'",
        "'judge.py:f?token=w7'",
        "[{api_keys: [w7]}]",
    )
    for section in sections:
        (problem,) = problems_of(write("rewards: [" + section + "]"), MINIMAL_KEYS).values()
        assert "w7" not in problem and "***" in problem
    (problem,) = problems_of(
        write(MINIMAL), ["dataset.source=https://w7@host/a.jsonl", "dataset.split=b"]
    ).values()
    assert "w7" not in problem and "https://***@host" in problem


def test_a_command_line_is_shown_without_its_secrets():
    options = "rewards.0.options"
    command = ["grpo-fast", "train", f"{options}.api_key=x", f"--{options}.api-key", "x", "loss.beta=0.1"]
    shown = ["grpo-fast", "train", f"{options}.api_key=***", f"--{options}.api-key", "***", "loss.beta=0.1"]
    command += [f"--{options}.token=x", f"{options}={{key: x, n: 1}}", f"{options}={{key: x", "a={n: 1}"]
    shown += [f"--{options}.token=***", f"{options}=***", f"{options}=***", "a={n: 1}"]
    assert masked_command(command) == shown


def test_two_configurations_differ_in_the_keys_that_are_named():
    before = {"a": 1, "lora": None, "rewards": [{"weight": 1}, {"weight": 2}], "stages": [1]}
    now = {"a": 1, "lora": {"r": 2}, "rewards": [{"weight": 1}, {"weight": 3}], "stages": [1, 2]}
    found = [*differences(before, now)]
    assert found == [("lora", None, {"r": 2}), ("rewards.1.weight", 2, 3), ("stages", [1], [1, 2])]
    assert all(value_at(now, key) == new for key, _, new in found)
    assert value_at(now, "lora.alpha.x") is value_at(now, "rewards.7.weight") is None
