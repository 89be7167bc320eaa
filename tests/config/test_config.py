"""Configuration files: what is accepted, what is refused, and what the person is told."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.cli import main
from grpo_fast.config import schema as config_module
from grpo_fast.config.foreign.names import ABSENT, MOVED
from grpo_fast.config.keys import REMOVED, ConfigError, keys
from grpo_fast.config.load import dump_config, load_config
from grpo_fast.config.methods import with_method
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked, masked_command
from grpo_fast.config.tree import differences, flatten, value_at
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
SYNTAX = "${HF_TOKEN} ${open ???"  # OmegaConf's, which is plain text here
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
        [
            "dataset.source=reasoning_gym:any",
            "dataset.options={tolerance: 1e-6, name: '1e-6', switch: on, day: 2020-01-02}",
        ],
        {"optimizer.betas": (0.9, 0.95)}
        | {"dataset.options": {"tolerance": 1e-6, "name": "1e-6", "switch": True, "day": "2020-01-02"}},
    ),
    (
        MINIMAL + f"dataset: {{source: d.jsonl, system_prompt: '{SYNTAX}'}}",
        [],
        {"dataset.system_prompt": SYNTAX},
    ),
    (MINIMAL, [f"dataset.system_prompt={SYNTAX}"], {"dataset.system_prompt": SYNTAX}),
    (MINIMAL, ["dataset.system_prompt=???"], {"dataset.system_prompt": "???"}),
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
    (MINIMAL, ["max_steps=1e3"], {"max_steps": 1000}),
    ("{}", LIST, {"rewards.0.reward": "mine:score", "rewards.0.weight": 2, "rewards.1.weight": 1}),
    # A key of text takes braces as they are.
    *(
        (MINIMAL, [f"dataset.prompt_template={text}"], {"dataset.prompt_template": text})
        for text in ("{question}", "{question}?", "{input", "[INST] {q}")
    ),
]


@pytest.mark.parametrize(("text", "overrides", "places"), ACCEPTED)
def test_files_overrides_and_flat_names_reach_their_places(write, text, overrides, places):
    if text.count("dataset:") > 1:
        text = text.replace("dataset: {source: rows.jsonl}\n", "")
    config = load_config(write(text), overrides)

    assert {place: at(config, place) for place in places} == places


FLAT = """
num_generations=4 max_completion_length=99 temperature=0.7 top_k=-1 max_prompt_length=98 beta=0.04 epsilon=0.1
epsilon_high=0.28 loss_type=dr_grpo scale_rewards=false lora_r=4 mask_truncated_completions=true
max_grad_norm=0 lr_scheduler_type=constant_with_warmup adam_beta2=0.99 bf16=false gradient_checkpointing=true
logging_steps=7 save_steps=8 eval_steps=9 save_total_limit=5 report_to=[wandb] dtype=torch.float32
use_vllm=false stop=end model_init_kwargs={"revision":"main"} generation_kwargs={"top_p":0.9}
flash_attention=true hub_token=null repetition_penalty=1.0 push_to_hub=false use_cache=true
"""
PLACED = """
rollout: {num_generations: 4, max_completion_length: 99, temperature: 0.7, top_k: 0, top_p: 0.9, stop: [end],
          engine: transformers}
dataset: {max_prompt_length: 98}
loss: {beta: 0.04, epsilon_low: 0.1, epsilon_high: 0.28, loss_type: dr_grpo}
advantage: {scale_rewards: none, mask_truncated: true}
optimizer: {schedule: constant, max_grad_norm: null, betas: [0.9, 0.99]}
model: {dtype: float32, gradient_checkpointing: true, revision: main, attention: flash_attention_2,
        lora: {r: 4}}
logging: {every: 7, tensorboard: false, wandb: true}
checkpoint: {every: 8, keep: 5}
evaluation: {every: 9}
"""


def test_flat_names_known_from_trl_and_axolotl_find_their_place(write):
    places = yaml.safe_load(MINIMAL) | flatten(yaml.safe_load(PLACED))
    assert load_config(write(MINIMAL), FLAT.split()) == load_config(None, places)


# Overrides, and what the one problem with each says: its key first.
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
    ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n", "verl"),
    ("minibatches=40", "the configuration", "minibatches = 40"),
    ("rewards.1.weight=2", "rewards.1.weight"),
    ("model.lora.target_modules=3", "model.lora.target_modules"),
    ("max_steps=true", "max_steps"),
    ("max_steps.x=1", "max_steps"),
    ("learning_rate='1e-5'", "optimizer.learning_rate"),
    ("logging.wandb=1", "logging.wandb"),
    ("dataset.chat='yes'", "dataset.chat"),
    ("optimizer.betas=[0.9]", "optimizer.betas.1"),
    ("optimizer.betas=[0.9", "optimizer.betas", "line 1"),
    ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1", "less than 1"),
    ("optimizer.max_grad_norm=.inf", "optimizer.max_grad_norm", "a finite number"),
    ("loss.beta=.nan", "loss.beta", "a finite number"),
    ("num_generations=1000000000", "rollout.num_generations", "65536"),
    ("temperature=1e30", "rollout.temperature", "100"),
    ("rewards.0.weight=1e300", "rewards.0.weight", "1000000"),
    ("seed=4294967296", "seed", "less than or equal to 2147483647"),
    ("hub.push=near-w7", "hub.push", "write owner/near-w7"),
    ("hub.push=ada/near w7", "hub.push"),
    ("alerts.window=0", "alerts.window", "greater than or equal to 1"),
    ("dataset.examples=[[question]]", "dataset.examples.0.1"),
    ("model.lora=true", "model.lora"),
    ("optimizer.learning_rat=1", "optimizer.learning_rat", "did you mean optimizer.learning_rate"),
    ("num_generation=4", "num_generation", "did you mean num_generations"),
    ("optimizer.num_generations=4", "optimizer.num_generations", "rollout.num_generations"),
    ("rewards.0.weigth=2", "rewards.0.weigth", "did you mean rewards.0.weight"),
    ("model.lora={alhpa: 3}", "model.lora.alhpa", "did you mean model.lora.alpha"),
    ("roll_out={}", "roll_out", "did you mean rollout"),
    ("dataset.split=test", "dataset", "with source = 'rows.jsonl'"),
    ("dataset.seed=3", "dataset", "with source"),
    ("model={path: 'package:llm', revision: main}", "model", "no hub id"),
    ("groups.max_group_size=8", "groups", "by groups.strategy"),
    (
        "advantage={function: 'a:b', baseline: leave_one_out}",
        "the configuration",
        "beside advantage.function",
    ),
    ("loss.kl_in_reward=true", "the configuration", "loss.kl_in_reward = True is not read without loss.beta"),
    ("loss.entropy_target=1", "the configuration", "without loss.use_adaptive_entropy"),
    ("loss.max_completion_length=64", "the configuration", "constant_length"),
    ("optimizer.min_learning_rate_ratio=0.1", "optimizer", "by schedule = 'constant'"),
    ("preference.loss.beta=0.3", "the configuration", "by algorithm = 'grpo'"),
    ("algorithm=dpo", "the configuration", "rewards = [RewardConfig(", "by algorithm = 'dpo'"),
    ("old_logprobs=sampler rollout.top_p=0.9", "the configuration", "rollout.top_p = 0.9"),
    ("loss.sampler_correction=token_mask old_logprobs=sampler", "the configuration", "'token_mask'"),
    ("rollout.router_replay=true model.compile=true", "the configuration", "model.compile"),
    ("optimizer.stochastic_rounding=true model.dtype=float16", "the configuration", "model.dtype"),
    ("curriculum={} groups.strategy=similarity", "the configuration", "curriculum and groups.strategy"),
    ("optimizer.warmup_steps=100", "the configuration", "optimizer.warmup_steps = 100"),
    ("epochs=2 max_steps=100", "the configuration", "epochs = 2 says", "max_steps"),
    ("epochs=2 curriculum={}", "the configuration", "curriculum"),
    ("epochs=2 advantage.dynamic_sampling=true", "the configuration", "advantage.dynamic_sampling"),
    ("epochs=2 stages=[{name: a}]", "the configuration", "stages"),
    ("learning_rate=1e-5 optimizer.learning_rate=2e-5", "optimizer.learning_rate", "given twice", "1e-05"),
]


@pytest.mark.parametrize(("override", "parts"), [(override, parts) for override, *parts in REFUSED])
def test_a_wrong_setting_is_refused_by_its_key(write, override, parts):
    overrides = re.split(r" (?=[\w.]+=)", override)
    ((name, problem),) = problems_of(write(MINIMAL), overrides).items()
    assert name == parts[0] and all(part in problem for part in parts[1:])
    assert parts[1:] or len(problem) > 40  # it says what to do


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
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from kinds(inner, lambda value: wrap({"a": value}))


NUMBERS = [
    (name, put)
    for name, schema in keys().items()
    for kind, put in kinds(schema)
    if kind in ("number", "integer")
]


@settings(max_examples=100)
@given(
    number=st.sampled_from(NUMBERS),
    bad=st.sampled_from([math.inf, -math.inf, math.nan, 10**400, True, "1", "text"]),
)
def test_no_number_is_infinite_a_switch_or_a_text(tmp_path_factory, number, bad):
    name, put = number
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    inside = (key for key, schema in keys().items() if name.startswith(f"{key}.") and "items" in schema)
    if repeated := next(inside, None):
        setting: dict[str, Any] = {repeated: [{name.removeprefix(f"{repeated}."): put(bad)}]}
    else:
        setting = {name: put(bad)}

    found = problems_of(path, setting)

    assert any(re.sub(r"\.\d+\b", "", place).startswith(name) for place in found), found


def test_every_key_is_described_and_every_whole_number_bounded():
    for name, schema in keys().items():
        assert schema.get("description") or "$ref" in schema or "allOf" in schema, name
        for part in (schema, *schema.get("anyOf", ()), schema.get("items", {})):
            assert part.get("type") != "integer" or "maximum" in part, name


def test_every_problem_is_listed_at_once_with_its_place_and_value(write):
    text = (
        "model: {path: m, dtype: bfloat}\nrollout: {num_generations: 1}\nrewards: [{weight: 1}]\nfoo_bar: 3\n"
    )
    found = problems_of(write(text), ["optimizer.learning_rate=fast", "max_steps.x=1"])

    of_the_file = {"model.dtype", "rollout.num_generations", "rewards.0.reward", "dataset", "foo_bar"}
    assert set(found) == {*of_the_file, "optimizer.learning_rate", "max_steps"}
    assert "rollout.num_generations = 1: should be greater than or equal to 2" in str(found)
    assert found["dataset"] == "dataset: is required"


ALIAS_BOMB = "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("name", "text", "tokens", "part"),
    [
        ("a.yaml", MINIMAL + "seed: 1\nseed: 1\n", [], "the key `seed` is given twice"),
        ("a.yaml", "- a\n- b\n", [], "holds no mapping"),
        ("a.yaml", "just words", [], "holds no mapping"),
        ("a.yaml", "a: [1", [], "line 1"),
        ("a.yaml", "a: !!python/object:os.system {}", [], "line 1"),
        ("a.yaml", "a: \x01", [], "cannot be read"),
        ("a.yaml", b"\xff\xfe\x00seed", [], "cannot be read"),
        ("a.yaml", ALIAS_BOMB, [], "1,000,000 values by its aliases"),
        ("a.yaml", "a: &a [*a]\n", [], "nested too deeply, or in itself"),
        ("a.yaml", "a: " + 5000 * "[", [], "nested too deeply"),
        ("a.json", 10**5 * "[" + 10**5 * "]", [], "nested too deeply"),
        ("a.yaml", MINIMAL, ["learning_rate"], "is no assignment"),
        ("a.yaml", MINIMAL, ["--learning_rate"], "is no assignment"),
        ("a.yaml", MINIMAL, ["--learning_rate", "--beta", "1"], "is no assignment"),
        ("a.yaml", MINIMAL, ["seed=1", "seed=2"], "given twice"),
        ("a.yaml", MINIMAL + "warmup_ratio: 0.1", [], "needs max_steps"),
        ("a.yaml", MINIMAL + "learning_rate: 1e-5\noptimizer: {learning_rate: 1e-6}", [], "given twice"),
    ],
)
def test_what_holds_no_plain_mapping_or_assignment_is_refused(tmp_path, name, text, tokens, part):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert part in str(problems_of(tmp_path / name, tokens))


def test_recipes_and_losses_survive_a_round_trip_and_any_length(write):
    configs = [load_config(recipe) for recipe in ("quickstart", "gsm8k", "dpo", "rank")]
    configs += [load_config(write(MINIMAL), [f"loss_type={loss_type}"]) for loss_type in LOSS_TYPES]
    for config in configs:
        path = write(dump_config(config))
        assert load_config(path) == load_config(path.parent) == config  # a run's directory stands for it
    for recipe in ("quickstart", "gsm8k", "dpo", "rank"):
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


def test_a_command_validates_its_configuration_once(toy, write, monkeypatch, tmp_path: Path):
    validated: list[Any] = []
    monkeypatch.setattr(
        config_module, "with_method", lambda tree: (validated.append(tree), with_method(tree))[1]
    )
    load_config(write(MINIMAL + RATE), ["max_steps=7", "method=gspo", "learning_rate=1e-5"])
    assert len(validated) == 1
    validated.clear()
    command = ["train", str(write(yaml.safe_dump(toy))), "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    assert main(command) == 0 and len(validated) == 1
    validated.clear()
    assert main([*command, "--resume"]) == 0 and len(validated) == 3  # for the plan, and to compare


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
