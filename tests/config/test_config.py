"""Configuration files: what is accepted, what is refused, and what the person is told."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_fast.cli import main
from grpo_fast.config import schema as config_module
from grpo_fast.config.foreign.names import ABSENT, MOVED
from grpo_fast.config.keys import ConfigError, is_key, keys
from grpo_fast.config.load import dump_config, load_config
from grpo_fast.config.methods import with_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked, masked_command
from grpo_fast.objective.catalog import LOSS_TYPES

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


def at(config: TrainConfig, place: str) -> Any:
    """`rewards.0.weight` of a configuration."""
    value: Any = config
    for part in place.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


ALIASES = """
model: {path: m}
rewards: [{reward: exact_match}]
dataset: &task {source: "reasoning_gym:chain_sum", seed: 1, options: {a: 1}}
evaluation: {dataset: {<<: *task, seed: 2}}
"""
RATE = "optimizer: {learning_rate: 3e-6, weight_decay: 0.1}"
LIST = ["base_model=m", "dataset_name=d", "reward_weights=[2,1]", "reward_funcs=[mine.score,exact_match]"]
STAGES = "stages=[{name: a, steps: 50}, {name: b, overrides: {loss: {beta: 0.1}}}]"
Places = dict[str, Any]
ACCEPTED: list[tuple[str, list[str], Places]] = [
    (MINIMAL + RATE, [], {"model.path": "some/model", "optimizer.learning_rate": 3e-6}),
    (MINIMAL, [], {"rollout.num_generations": "auto", "micro_batch_tokens": "auto"}),
    *(
        (MINIMAL + RATE, tokens, {"optimizer.learning_rate": 1e-5, "optimizer.weight_decay": 0.1})
        for tokens in (
            ["optimizer.learning_rate=1e-5"],
            ["--optimizer.learning_rate=1e-5"],
            ["--optimizer.learning_rate", "1e-5"],
            ["learning_rate=1e-5"],
            ["--learning-rate", "1e-5"],
            ["optimizer={learning_rate: 1e-5}"],
        )
    ),
    (MINIMAL, ["rewards.0.weight=0.5"], {"rewards.0.reward": "exact_match", "rewards.0.weight": 0.5}),
    (ALIASES, ["dataset.options={b: 2}"], {"dataset.options": {"b": 2}}),
    (
        ALIASES,
        ["dataset.options.a=2"],
        {"dataset.options": {"a": 2}}
        | {"evaluation.dataset.options": {"a": 1}, "evaluation.dataset.seed": 2},
    ),
    (
        MINIMAL + "optimizer: {betas: [9e-1, 95e-2]}",  # exponents without a point are numbers
        ["dataset.source=reasoning_gym:any", "dataset.options={tolerance: 1e-6, name: '1e-6'}"],
        {"optimizer.betas": (0.9, 0.95), "dataset.options": {"tolerance": 1e-6, "name": "1e-6"}},
    ),
    (MINIMAL + "learning_rate: 3e-6\n" + RATE, [], {"optimizer.learning_rate": 3e-6}),  # twice, but agreed
    *(
        (MINIMAL + text, tokens, {"optimizer.warmup_steps": 5})
        for text, tokens in (
            ("max_steps: 50\nwarmup_ratio: 0.1", []),
            ("max_steps: 100\nwarmup_ratio: 0.1", ["max_steps=50"]),
            ("max_steps: 50", ["warmup_ratio=0.1"]),
            ("warmup_ratio: 0.9", ["max_steps=6"]),  # a step at the full rate is left
        )
    ),
    (MINIMAL + "max_steps: 10", ["save_steps=1"], {"checkpoint.every": 1}),  # not a share
    (
        MINIMAL,
        ["vllm_importance_sampling_correction=false", "vllm_importance_sampling_mode=token_mask"],
        {"loss.sampler_correction": "none"},
    ),
    (MINIMAL + "adapter: lora\nlora_r: 4", [], {"model.lora.r": 4}),
    (MINIMAL, ["push_to_hub=true", "hub_model_id=ada/m"], {"hub.push": "ada/m", "hub.private": True}),
    (MINIMAL, ["push_to_hub=false", "hub_model_id=ada/m", "hub_private_repo=false"], {"hub": None}),
    (MINIMAL, ["max_steps=1e3"], {"max_steps": 1000}),
    (MINIMAL, [STAGES, "loss.kl_in_reward=true"], {"loss.kl_in_reward": True}),  # which one stage reads
    ("{}", LIST, {"rewards.0.reward": "mine:score", "rewards.0.weight": 2, "rewards.1.weight": 1}),
]


@pytest.mark.parametrize(("text", "overrides", "places"), ACCEPTED)
def test_files_overrides_and_flat_names_reach_their_places(write, text, overrides, places):
    config = load_config(write(text), overrides)

    assert {place: at(config, place) for place in places} == places


FLAT = """
{num_generations: 4, max_completion_length: 99, temperature: 0.7, top_k: -1, max_prompt_length: 98,
 beta: 0.04, epsilon: 0.1, epsilon_high: 0.28, loss_type: dr_grpo, scale_rewards: false, lora_r: 4,
 mask_truncated_completions: true, learning_rate: 2.0e-6, lr_scheduler_type: constant_with_warmup,
 warmup_steps: 3, max_grad_norm: 0, adam_beta2: 0.99, bf16: false, gradient_checkpointing: true,
 logging_steps: 7, save_steps: 8, eval_steps: 9, save_total_limit: 5, report_to: [wandb],
 dtype: torch.float32,
 model_init_kwargs: {revision: main}, generation_kwargs: {top_p: 0.9}, stop: end, use_vllm: false,
 repetition_penalty: 1.0, flash_attention: true, hub_token: null, push_to_hub: false, use_cache: true}
"""
PLACES = {
    "rollout": {"num_generations": 4, "max_completion_length": 99, "temperature": 0.7, "top_k": 0}
    | {"top_p": 0.9, "stop": ["end"], "engine": "transformers"},
    "dataset": {"max_prompt_length": 98},
    "loss": {"beta": 0.04, "epsilon_low": 0.1, "epsilon_high": 0.28, "loss_type": "dr_grpo"},
    "advantage": {"scale_rewards": "none", "mask_truncated": True},
    "optimizer": {"learning_rate": 2e-6, "schedule": "constant", "warmup_steps": 3}
    | {"max_grad_norm": None, "betas": (0.9, 0.99)},
    "model": {"dtype": "float32", "gradient_checkpointing": True, "revision": "main"}
    | {"attention": "flash_attention_2"},
    "logging": {"every": 7, "tensorboard": False, "wandb": True},
    "checkpoint": {"every": 8, "keep": 5},
    "evaluation": {"every": 9},
}


def test_flat_names_known_from_trl_and_axolotl_find_their_place(write):
    flat = "\n".join(f"{key}: {json.dumps(value)}" for key, value in yaml.safe_load(FLAT).items())
    config = load_config(write(MINIMAL + "evaluation: {dataset: {source: held_out.jsonl}}\n" + flat))

    for section, values in PLACES.items():
        assert {key: getattr(getattr(config, section), key) for key in values} == values


# Overrides, and what the one problem with each says.
REFUSED = [
    ("lr_scheduler_type=polynomial", "lr_scheduler_type"),
    ("optim=sgd", "optim"),
    ("push_to_hub=true", "push_to_hub"),
    ("report_to=[mlflow]", "report_to"),
    ("adapter=ia3", "adapter"),
    ("save_steps=0.1", "save_steps"),
    ("reward_weights=[1]", "reward_weights"),
    ("generation_kwargs={seed: 1}", "generation_kwargs"),
    ("lr_scheduler_kwargs={min_lr: 1e-7}", "lr_scheduler_kwargs"),
    ("shuffle_dataset=false", "shuffle_dataset"),
    ("num_train_epochs=0", "epochs"),
    ("optimizer.gradient_accumulation_steps=4", "optimizer.gradient_accumulation_steps"),
    ("minibatches=40", "the configuration"),
    ("rewards.1.weight=2", "rewards.1.weight"),
    ("model.lora.target_modules=3", "model.lora.target_modules"),
    ("max_steps=true", "max_steps", "should be a number, not true or false"),
    ("learning_rate='1e-5'", "optimizer.learning_rate", "should be a number, not text"),
    ("logging.wandb=1", "logging.wandb", "should be true or false, not a number"),
    ("dataset.chat='yes'", "dataset.chat", "should be"),
    ("optimizer.betas=[0.9]", "optimizer.betas", "has no value number 2"),
    ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas", "has 3 values, and takes 2"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1", "less than 1"),
    ("optimizer.max_grad_norm=.inf", "optimizer.max_grad_norm", "a finite number or null"),
    ("dataset.options={deep: [{er: .nan}]}", "dataset.options.deep.0.er", "a finite number"),
    ("rewards.0.options={deep: [1e400]}", "rewards.0.options.deep.0", "a finite number"),
    ("loss.beta=.nan", "loss.beta", "a finite number"),
    ("num_generations=1e9", "rollout.num_generations", "65536"),
    ("evaluation.num_samples=1e9", "evaluation.num_samples", "65536"),
    ("temperature=1e30", "rollout.temperature", "100"),
    ("rewards.0.weight=1e300", "rewards.0.weight", "1000000"),
    ("seed=4294967296", "seed", "less than or equal to 2147483647"),
    ("hub.push=near-w7", "hub.push", "write owner/near-w7"),
    ("hub.push=ada/near w7", "hub.push"),
    ("hub.push=ada/b/c", "hub.push"),
    ("alerts.window=0", "alerts.window", "greater than or equal to 1"),
    ("alerts.length_drift=1.0", "alerts.length_drift", "greater than 1"),
    ("dataset.examples=[[question]]", "dataset.examples.0", "has no value number 2"),
    ("model.lora=true", "model.lora", "should hold keys"),
    ("optimizer.learning_rat=1", "did you mean optimizer.learning_rate"),
    ("rollout.num_generation=4", "did you mean rollout.num_generations"),
    ("num_generation=4", "did you mean num_generations"),
    ("optimizer.num_generations=4", "did you mean rollout.num_generations"),
    ("rewards.0.weigth=2", "did you mean rewards.0.weight"),
    ("loss.beat=1", "did you mean loss.beta"),
    ("model.lora={alhpa: 3}", "did you mean model.lora.alpha"),
    ("roll_out={}", "did you mean rollout"),
    ("evaluation.every=5", "without evaluation.dataset"),
    ("dataset.split=test", "with dataset.source = 'rows.jsonl'"),
    ("dataset.seed=3", "with dataset.source"),
    ("dataset.overlong_prompts=error", "without dataset.max_prompt_length"),
    ("evaluation={size: 5, dataset: {source: rows.jsonl}}", "without evaluation.every"),
    ("model={path: 'package:llm', revision: main}", "no hub id"),
    ("rollout={engine: transformers, vllm: {max_sequences: 4}}", "by rollout.engine = 'transformers'"),
    ("rollout={engine: vllm, max_batch_tokens: 400}", "by rollout.engine = 'vllm'"),
    ("advantage.max_draws=4", "without advantage.dynamic_sampling"),
    ("advantage={function: 'a:b', baseline: leave_one_out}", "beside advantage.function"),
    ("loss.kl_in_reward=true", "without loss.beta"),
    ("loss.entropy_target=1", "without loss.use_adaptive_entropy"),
    ("loss.max_completion_length=64", "by loss.loss_type = 'dapo'"),
    ("optimizer.min_learning_rate_ratio=0.1", "by optimizer.schedule = 'constant'"),
    ("logging.project=mine", "without logging.wandb"),
    ("preference.loss.beta=0.3", "preference.loss = {'beta': 0.3}: is not read by algorithm = 'grpo'"),
    ("stages=[{name: a, steps: 50, overrides: {advantage: {max_draws: 4}}}, {name: b}]", "dynamic_sampling"),
]


@pytest.mark.parametrize(("override", "parts"), [(override, parts) for override, *parts in REFUSED])
def test_a_wrong_setting_is_refused_by_its_key_with_what_is_wrong(write, override, parts):
    (problem,) = problems_of(write(MINIMAL), [override]).values()
    assert all(part in problem for part in parts)
    assert parts[1:] or len(problem) > 40  # it says what to do


def test_weights_are_rounded_by_chance_to_bfloat16_alone(write):
    found = problems_of(write(MINIMAL), ["optimizer.stochastic_rounding=true", "model.dtype=float16"])
    assert "model.dtype = 'float16'; leave it out" in found["the configuration"]


def kinds(
    schema: Any, wrap: Callable[[Any], Any] = lambda value: value
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(type, what puts a value of it in its place) of all that a key may hold, sections apart."""
    if "type" in schema:
        yield schema["type"], wrap
    for inner in schema.get("anyOf", ()):
        yield from kinds(inner, wrap)
    for inner in (schema.get("items"), *schema.get("prefixItems", ())[:1]):
        if inner:
            yield from kinds(inner, lambda value: wrap([value] * schema.get("minItems", 1)))
    if inner := schema.get("additionalProperties"):
        yield from kinds({"type": "any"} if inner is True else inner, lambda value: wrap({"a": value}))


NUMBERS = [
    (name, kind, put)
    for name, schema in keys().items()
    for kind, put in kinds(schema)
    if kind in ("number", "integer", "any")
]
NOT_FINITE = [math.inf, -math.inf, math.nan]


@settings(max_examples=100)
@given(number=st.sampled_from(NUMBERS), bad=st.sampled_from([*NOT_FINITE, 10**400, True, "1", "text"]))
def test_no_number_is_infinite_a_switch_or_a_text(tmp_path_factory, number, bad):
    name, kind, put = number
    assume(kind != "any" or bad in NOT_FINITE)
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    inside = (key for key, schema in keys().items() if name.startswith(f"{key}.") and "items" in schema)
    if repeated := next(inside, None):
        setting: dict[str, Any] = {repeated: [{name.removeprefix(f"{repeated}."): put(bad)}]}
    else:
        setting = {name: put(bad)}

    found = problems_of(path, setting)

    section, _, leaf = name.rpartition(".")  # whose own checks speak of the key
    assert any(
        re.sub(r"\.\d+\b", "", place).startswith(name) or (place == section and f": {leaf} = " in said)
        for place, said in found.items()
    ), found


def test_every_key_is_described_and_every_whole_number_bounded():
    for name, schema in keys().items():
        assert schema.get("description") or "$ref" in schema or "allOf" in schema, name
        for part in (schema, *schema.get("anyOf", ()), schema.get("items", {})):
            assert part.get("type") != "integer" or "maximum" in part, name


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("learning_rate: 1e-5\noptimizer: {learning_rate: 1e-6}", []),
        ("", ["learning_rate=1e-5", "optimizer.learning_rate=2e-5"]),
    ],
)
def test_a_name_and_its_place_with_different_values_contradict_each_other(write, text, overrides):
    found = problems_of(write(MINIMAL + text), overrides)
    assert list(found) == ["optimizer.learning_rate"]
    assert "1e-05" in str(found)


def test_every_problem_is_listed_at_once_with_its_place_and_value(write):
    text = (
        "model: {path: m, dtype: bfloat}\nrollout: {num_generations: 1}\nrewards: [{weight: 1}]\nfoo_bar: 3\n"
    )
    found = problems_of(write(text), ["optimizer.learning_rate=fast", "max_steps.x=1"])

    of_the_file = {"model.dtype", "rollout.num_generations", "rewards.0.reward", "dataset", "foo_bar"}
    assert set(found) == {*of_the_file, "optimizer.learning_rate", "max_steps.x"}
    assert "rollout.num_generations = 1: should be greater than or equal to 2" in str(found)
    assert "did you mean bfloat16?" in found["model.dtype"]
    assert found["dataset"] == "dataset: is required"


@pytest.mark.parametrize(
    ("text", "tokens", "part"),
    [
        (MINIMAL + "seed: 1\nseed: 1\n", [], "the key `seed` is given twice"),
        *(
            (text, [], "")
            for text in ("- a\n- b\n", "just words", "a: [1", "a: !!python/object:os.system {}")
        ),
        ("a: \x01", [], ""),
        (b"\xff\xfe\x00seed", [], "cannot be read"),
        *(
            (MINIMAL, tokens, "is no assignment")
            for tokens in (["learning_rate"], ["--learning_rate"], ["--learning_rate", "--beta", "1"])
        ),
        (MINIMAL + "warmup_ratio: 0.1", [], "needs max_steps"),
    ],
)
def test_what_holds_no_plain_mapping_or_assignment_is_refused(write, text, tokens, part):
    assert part in str(problems_of(write(text), tokens))


def test_the_shipped_recipes_and_every_loss_survive_a_round_trip(write):
    configs = [load_config(recipe) for recipe in ("quickstart", "gsm8k", "dpo", "rank")]
    configs += [load_config(write(MINIMAL), [f"loss_type={loss_type}"]) for loss_type in LOSS_TYPES]
    for config in configs:
        path = write(dump_config(config))
        assert load_config(path) == load_config(path.parent) == config  # a run's directory stands for it


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


def test_a_bound_of_the_correction_is_read_where_vllm_may_sample(write):
    bound = "loss.sampler_clip_max=2"
    assert load_config(write(MINIMAL), [bound, "rollout.engine=vllm"]).loss.sampler_clip_max == 2
    (problem,) = problems_of(write(MINIMAL), [bound, "rollout.engine=transformers"]).values()
    assert "without loss.sampler_correction" in problem


def test_overrides_leave_behind_what_the_file_set_and_they_leave_unread(write):
    local = load_config("gsm8k", ["dataset.source=train.jsonl", "evaluation.dataset.source=test.jsonl"])
    assert (local.dataset.name, local.dataset.split, local.evaluation.dataset.split) == (
        None,
        "train",
        "train",
    )
    assert load_config("gsm8k", ["evaluation.dataset=null"]).evaluation.every == 0
    assert list(problems_of(write(MINIMAL + "evaluation: {every: 3}"), ["seed=1"])) == ["evaluation.every"]


@pytest.fixture
def validated(monkeypatch) -> list[Any]:
    """What has been validated as a whole configuration."""
    found: list[Any] = []
    monkeypatch.setattr(config_module, "with_method", lambda tree: (found.append(tree), with_method(tree))[1])
    return found


def test_files_and_overrides_are_put_together_first_and_validated_once(write, validated):
    load_config(write(MINIMAL + RATE), ["max_steps=7", "method=gspo", "learning_rate=1e-5"])
    assert len(validated) == 1
    load_config("gsm8k", ["evaluation.dataset=null"])  # which leaves keys of the file unread
    assert len(validated) == 1 + 3


def test_a_run_of_the_command_validates_its_configuration_once_and_a_resumed_one_that_of_the_run(
    toy, write, validated, tmp_path: Path
):
    command = ["train", str(write(yaml.safe_dump(toy))), "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    assert main(command) == 0 and len(validated) == 1
    validated.clear()
    assert main([*command, "--resume"]) == 0 and len(validated) == 3  # for the plan, and to compare


@pytest.mark.parametrize("recipe", ["quickstart", "gsm8k", "dpo", "rank"])
def test_a_recipe_takes_any_number_of_steps(recipe):
    for steps in (1, 3, 1000):
        assert load_config(recipe, [f"max_steps={steps}"]).optimizer.warmup_steps < steps


TEXT = st.text([*map(chr, range(32, 127)), *"\x85\u00a0é€\u2028漢😀"], max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=8)
@given(options=st.dictionaries(TEXT, PLAIN, max_size=4), prompt=TEXT)
def test_any_plain_options_and_text_survive_a_round_trip(tmp_path_factory, options, prompt):
    base = {"source": "reasoning_gym:any", "options": options, "system_prompt": prompt}
    config = TrainConfig(model={"path": "m"}, dataset=base, rewards=[{"reward": "exact_match"}])
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")

    assert load_config(path) == config


def test_the_table_of_foreign_names_leads_only_to_places_that_exist_or_gives_a_reason():
    places = {getattr(rule, "keywords", {}).get("to", rule) for rule in MOVED.values()}
    assert not {place for place in places if isinstance(place, str) and not is_key(place)}
    assert not set(MOVED) & set(ABSENT)


def test_a_runs_length_is_in_steps_or_in_epochs_and_the_command_line_wins(write):
    by_epochs = load_config(write(MINIMAL + "epochs: 2\noptimizer: {warmup_steps: 300}\n"))
    printed = yaml.safe_load(dump_config(by_epochs))
    assert printed["epochs"] == 2 and "max_steps" not in printed
    assert load_config(write(dump_config(by_epochs))) == by_epochs

    path = write(MINIMAL + "max_steps: 7\n")
    assert load_config(path, ["epochs=2"]).epochs == load_config(path, ["num_train_epochs=2"]).epochs == 2
    back = load_config(write(MINIMAL + "epochs: 2\n"), ["max_steps=100"])
    assert (back.epochs, back.max_steps) == (None, 100)
    for setting, said in (
        ("max_steps: 100", "both say how long the run is"),
        ("curriculum: {}", "which curriculum leaves open"),
        ("advantage: {dynamic_sampling: true}", r"which advantage.dynamic_sampling leaves open"),
        ("stages: [{name: a}]", "which stages leaves open"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(write(MINIMAL + f"epochs: 2\n{setting}\n"))


ALIASES = "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.yaml", ALIASES, "1,000,000 values by its aliases"),
        ("config.yaml", "a: &a [*a]\n", "nested too deeply, or in itself"),
        ("config.yaml", "a: " + 10**5 * "[", "nested too deeply"),
        ("config.json", 10**5 * "[" + 10**5 * "]", "nested too deeply"),
    ],
    ids=["aliases", "in itself", "deep yaml", "deep json"],
)
def test_a_file_without_end_is_refused_at_once(tmp_path: Path, name: str, text: str, said: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}.*\n  .*{said}"):
        load_config(tmp_path / name)


def test_a_key_of_text_takes_braces_from_the_command_line_as_they_are(write):
    path = write(MINIMAL)
    for text in ("{question}", "{question}?", "{input", "[INST] {q}"):
        assert load_config(path, [f"dataset.prompt_template={text}"]).dataset.prompt_template == text
    assert load_config(path, ["dataset.prompt_template=null"]).dataset.prompt_template is None
    with pytest.raises(ConfigError, match="line 1"):
        load_config(path, ["optimizer.betas=[0.9"])


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ({"api_key": "a", "clientSecret": "c", "x": 1}, {"api_key": "***", "clientSecret": "***", "x": 1}),
        ({"HF_TOKEN": "b", "password": 1234}, {"HF_TOKEN": "***", "password": "***"}),
        ({"token": {"value": "a", "of": ["b"]}}, {"token": {"value": "***", "of": ["***"]}}),
        ([{"auth": {"key": "a"}}, "plain"], [{"auth": {"key": "***"}}, "plain"]),
        ({"key": "${NAME}", "token": None, "secret": False}, ...),
        ({"num_tokens": 5, "max_new_tokens": "7", "tokenizer": "t", "eos_token": "<e>"}, ...),
        ({"url": "postgres://me:pw@host:5432/db"}, {"url": "postgres://me:***@host:5432/db"}),
        ({"url": "https://host:80/a@b"}, ...),
        ({"url": "https://host/?a=1&api_key=x&b=2"}, {"url": "https://host/?a=1&api_key=***&b=2"}),
    ],
)
def test_what_is_secret_is_hidden_and_what_only_sounds_so_is_not(written: Any, shown: Any):
    assert masked(written) == (written if shown is ... else shown)


def test_a_command_line_is_shown_without_its_secrets():
    options = "rewards.0.options"
    command = ["grpo-fast", "train", f"{options}.api_key=x", f"--{options}.api-key", "x", "loss.beta=0.1"]
    shown = ["grpo-fast", "train", f"{options}.api_key=***", f"--{options}.api-key", "***", "loss.beta=0.1"]
    command += [f"--{options}.token=x", f"{options}={{key: x, n: 1}}", f"{options}={{key: x"]
    shown += [f"--{options}.token=***", f'{options}={{"key": "***", "n": 1}}', f"{options}=***"]
    assert masked_command(command) == shown
