"""Check that README.md and docs/ show what the code does: commands, code blocks, tables, links."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from benchmarks.__main__ import main as benchmarks
from grpo_fast import cli
from grpo_fast.config.load import load_config
from grpo_fast.config.rewards import BUILTINS
from grpo_fast.config.schema import TrainConfig
from grpo_fast.integrations.compat import HOSTS
from grpo_fast.objective.catalog import CATALOG, METHODS
from grpo_fast.record.summary import bytes_text
from grpo_fast.rewards.loading import load_function

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
NAMES = [path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/") for path in PATHS]
PAGES = {name: path.read_text(encoding="utf-8") for name, path in zip(NAMES, PATHS, strict=True)}
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
NEEDS = ("(needs a GPU)", "(needs the hub", "(takes ")
TRL = {"num_generations": 4, "learning_rate": 1e-6, "max_steps": 10, "reward_funcs": ["rewards.near_w7"]}
TRL |= {"model_name_or_path": "org/model", "dataset_name": "org/rows"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """Return `grpo-fast` commands, without those that name a need, and without `make train`'s."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if not any(need in line for need in NEEDS)]
    own = [tokens[1:] for tokens in found if tokens[:1] == ["grpo-fast"]]
    return [tokens for tokens in own if tokens != ["train", "quickstart"]]


SCRIPT = """
args = GRPOConfig(max_steps=1, max_completion_length=4, gradient_checkpointing=False, use_cpu=True)
def reward(completions, **columns):
    return [float(len(text)) for text in completions]
GRPOTrainer("{model}", reward, args, load_dataset("json", data_files="{rows}", split="train"))
"""


@pytest.mark.parametrize("name", [name for name in sorted(PAGES) if commands(PAGES[name])])
def test_every_command_runs_as_it_stands(name: str, toy: dict[str, Any], tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = toy | {"max_steps": 2, "output_dir": "runs/default"}
    settings["dataset"] = toy["dataset"] | {"max_prompt_length": 8}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(TRL), encoding="utf-8")
    rows, model = toy["dataset"]["source"], toy["model"]["path"]
    (tmp_path / "train.py").write_text(SCRIPT.format(rows=rows, model=model), encoding="utf-8")

    for tokens in commands(PAGES[name]):
        assert cli.main(tokens) == 0, f"{shlex.join(tokens)}\n{capsys.readouterr().err}"


def test_the_commands_of_the_benchmarks_are_there(monkeypatch, capsys):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    text = "\n".join([*PAGES.values(), (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")])
    found = {
        words for words in re.findall(r"python -m benchmarks ([a-z][^`\n#(]*)", text) if "tables" not in words
    }

    assert {words.split()[0] for words in found} >= {"head", "step", "recipe", "bias"}
    for words in found:
        given = [*shlex.split(words), "--collect-only", "-p", "no:faulthandler"]
        assert benchmarks(given) == 0, f"{words}\n{capsys.readouterr()}"


@pytest.mark.parametrize("name", [name for name in sorted(PAGES) if blocks(PAGES[name], "yaml")])
def test_every_configuration_is_one_that_train_takes(name: str, tmp_path):
    for number, text in enumerate(blocks(PAGES[name], "yaml")):
        shown = yaml.safe_load(text)
        whole: dict[str, Any] = {"model": {"path": "m"}, "dataset": {"source": "rows.jsonl"}}
        if shown.get("algorithm") is None and shown.keys() & {"method", "preference"} != {"preference"}:
            whole["rewards"] = [{"reward": "exact_match"}]
        if "preference" in shown:
            whole["algorithm"] = "dpo"
        for key, value in shown.items():
            whole[key] = whole[key] | value if isinstance(whole.get(key), dict) else value
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(whole), encoding="utf-8")

        config = load_config(path)

        if name == "README":
            assert config.dataset.max_prompt_length, "`grpo-fast plan` needs it"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "row",
    re.findall(r"^\| (\S+) \| (\S+) \| (.+) \| (.+ GiB) \| (\d+) \|$", PAGES["guides/memory"], re.M),
)
def test_the_planned_examples_are_what_the_plan_prints(row: tuple[str, ...], capsys):
    model, gpu, *told = row
    (command,) = re.findall(r"`grpo-fast (plan --model MODEL .*?)`", PAGES["guides/memory"])

    assert cli.main([*command.replace("MODEL", model).replace("GPU", gpu).split(), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    parts, values = found["parts"]["rollout"], found["values"]
    sizes = [bytes_text(parts[part]) for part in ("weights", "KV cache")]
    assert [*sizes, str(values["rollout.vllm.max_sequences"])] == told and found["fits"]
    assert values["rollout.vllm.lora_sync"] == "adapter"


@pytest.mark.parametrize("name", [n for n in sorted(PAGES) if n != "README" and blocks(PAGES[n], "python")])
def test_every_example_in_python_runs_as_it_stands(name: str, capsys):
    for code in blocks(PAGES[name], "python"):
        host = re.search(r"grpo_fast\.integrations\.(trl)", code)
        if host and find_spec(host[1]) is None:
            pytest.skip(f"{host[1]} is not installed")
        space: dict[str, Any] = {}
        exec(compile(code, f"{name}.md", "exec"), space)
        if host:
            import_module(host[0]).unpatch()
    if name == "how/head":
        assert "Certificate(density=" in capsys.readouterr().out


@pytest.mark.parametrize("name", BUILTINS)
def test_every_example_of_a_built_in_reward_has_that_result(name: str):
    section = PAGES["reference/rewards"].partition(f"## {name}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \| (\S+) \|$", section, re.M)
    assert rows
    for options, completion, answer, expected in rows:
        text = completion.startswith("`")
        columns: dict[str, Any] = {"completion_ids": [[0] * (1 if text else int(completion))]}
        if answer.startswith("`"):
            columns["answer"] = [json.loads(answer.strip("`"))]
            metadata = {"source_dataset": "chain_sum"}
            columns["entry"] = [{"answer": columns["answer"][0], "metadata": metadata}]
        _, function, _ = load_function(name, json.loads(options))
        scores = function(completions=[json.loads(completion.strip("`")) if text else ""], **columns)
        if asyncio.iscoroutine(scores):
            scores = asyncio.run(scores)

        assert scores == [None if expected == "none" else pytest.approx(float(expected))], (
            options,
            completion,
        )


def test_the_example_from_python_runs_on_the_toy(toy: dict[str, Any], tmp_path, monkeypatch, capsys):
    (code,) = blocks(README, "python")
    changes = {"Qwen/Qwen2.5-0.5B-Instruct": toy["model"]["path"], "max_steps=20": "max_steps=1, **quick"}
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    monkeypatch.chdir(tmp_path)
    quick = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "display": False}

    exec(compile(code, "README.md", "exec"), {"quick": quick})

    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_its_tables_are_those_of_the_checked_in_records(capsys):
    assert "<!-- table: quickstart_cpu -->" in PAGES["recipes"]
    code = benchmarks(["tables", "--check"])

    assert code == 0, capsys.readouterr().out + "write them with `python -m benchmarks tables`"


def test_the_versions_of_the_table_of_hosts_are_known_to_the_adapters():
    told = dict(re.findall(r"^\| ([\w-]+) \| (\d[\w., ]*) \|", PAGES["hosts"], re.M))
    of_adapter = {"liger_kernel": "liger", "ms_swift": "swift", "unsloth": "unsloth_zoo"}
    names = {name.lower().replace("-", "_"): re.findall(r"[\d.]+", text) for name, text in told.items()}
    versions = {of_adapter.get(name, name): numbers for name, numbers in names.items()}

    assert versions.keys() == HOSTS.keys() | {"liger"}  # whose adapter uses no private name
    for name in HOSTS:
        known = HOSTS[name].versions
        for number in versions[name]:
            oldest = re.match(rf">={re.escape(number)}\.", known)  # "0.11" for 0.11.2 and later
            assert oldest or SpecifierSet(known).contains(number), f"{name} {number}"


# ------------------------------------------------------------------------------------------- the methods

TOLD = {
    *("loss_type", "aggregation", "epsilon_low", "epsilon_high", "delta", "kl_cov_ratio", "dppo_ratio_max"),
    *("beta", "kl_estimator", "kl_in_reward", "baseline", "scale_rewards", "multi_objective_aggregation"),
    *("rescale_flat_groups", "skip_flat_groups", "dynamic_sampling", "max_draws", "soft_overlong"),
    *("use_adaptive_entropy", "entropy_target", "entropy_coef", "entropy_coef_max", "entropy_coef_delta"),
    "old_logprobs",
}
SECTIONS = re.split(r"^##+ ", PAGES["methods"], flags=re.M)[1:]


def rows_of(section: str) -> list[list[str]]:
    return [row.split(" | ") for row in re.findall(r"^\| (\w.*) \|$", section, re.M)]


def told(name: str) -> dict[str, str]:
    """The rows of docs/methods.md about ours, from the configuration that a method's name makes."""
    settings = {"model": {"path": "m"}, "dataset": {"source": "d"}, "rewards": [{"reward": "exact_match"}]}
    config = TrainConfig.model_validate(settings | {"method": name})
    loss, made, facts = config.loss, config.advantage, config.loss.facts

    def named(*fields: str) -> list[str]:
        return [f"{f} {getattr(loss, f):g}" for f in fields if getattr(loss, f) is not None]

    ratio = {"reinforce": "none", "vespo": "product"}.get(facts.surrogate, loss.ratio_level)
    centred = "r - mean of the others" if made.baseline == "leave_one_out" else "r - mean"
    divided = {"group": f"({centred}) / std", "batch": f"({centred}) / batch std", "none": centred}
    divided["mean"] = f"({centred}) / mean"
    advantages = divided.get(made.scale_rewards, f"{centred}, whitened over tokens")
    if made.multi_objective_aggregation == "normalize_then_sum":
        advantages = f"each reward {advantages}, summed, / batch std"
    low, high = loss.epsilon_low, loss.epsilon_high
    bounds = [] if high is None else [f"ceiling {high:g}" if low is None else f"{low:g} / {high:g}"]
    clip = bounds + named(*(f for f in facts.fields if not f.startswith("epsilon")))
    entropy = named("entropy_target", "entropy_coef_max", "entropy_coef_delta")
    kl = f"{loss.kl_kind}, {loss.beta:g}, in the {'reward' if loss.kl_in_reward else 'loss'}"
    flat = {
        made.dynamic_sampling: f"resampled, at most {made.max_draws} batches",
        made.rescale_flat_groups: "times B / (B - M)",
        bool(made.skip_flat_groups): "dropped",
    }
    rows = {
        "ratio, average": f"{ratio}, {loss.aggregation_kind}",
        "advantages": advantages,
        "clip": ", ".join(clip) or "none",
        "KL": kl if loss.beta else "none",
        "flat groups": flat.get(True, "advantage 0"),
        "length": made.soft_overlong
        and f"soft length penalty over the last {made.soft_overlong:g} of the limit",
        "old policy": config.old_logprobs == "sampler" and "the rollout engine",
        "entropy": ", ".join(["adaptive", *entropy])
        if loss.use_adaptive_entropy
        else loss.entropy_coef and f"bonus {loss.entropy_coef:g}",
    }
    return {row: cell for row, cell in rows.items() if cell}


def test_the_methods_page_tells_what_each_method_sets_and_its_paper():
    rewarded = {name: own for name, own in METHODS.items() if own["loss.loss_type"] in CATALOG}
    assert {key.rpartition(".")[2] for own in rewarded.values() for key in own} <= TOLD
    seen = []
    for section in SECTIONS:
        names = re.findall(r"`(\w+)`", section.partition("\n")[0])
        if names and not {*names} & rewarded.keys():  # what they set, in one row each
            rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M))
            for name in names:
                own = {key: value for key, value in METHODS[name].items() if "template" not in key}
                told_of = [f"`{key}: {value}`" for key, value in own.items()]
                assert rows[name].split(", ") == told_of, name
            seen += names
        elif names:
            cells, seen = [told(name) for name in names], seen + names
            joined = {row: "; ".join(dict.fromkeys(of[row] for of in cells)) for row in cells[0]}
            assert {row[0]: row[4] for row in rows_of(section)} == joined, names
            head = " ".join(section.partition("\n\n|")[0].split())
            assert all(CATALOG[name].paper in head for name in names if name in CATALOG), names
    assert sorted(seen) == sorted(METHODS)


PEERS = {  # its column, what a default looks like, where they are
    "trl": (-3, r"^    (\w+):[^=\n]*= field\(\s*default=(\S+),$", "trainer/grpo_config.py"),
    "verl": (-2, r"^ *(\w+): (\S+)$", "trainer/config/ppo_trainer.yaml", "trainer/config/actor/actor.yaml"),
}
OWN = {"`rloo`": "trainer/rloo_config.py", "`gmpo`": "experimental/gmpo/gmpo_config.py"}  # of TRL


@pytest.mark.parametrize("peer", PEERS)
def test_a_peers_value_on_the_methods_page_is_the_peers_default(peer):
    column, pattern, *files = PEERS[peer]
    spec = find_spec(peer)
    if spec is None:
        pytest.skip(f"{peer} is not installed")
    for section in SECTIONS:
        own = [file for name, file in OWN.items() if peer == "trl" and section.startswith(name)]
        text = "".join((Path(spec.origin).parent / file).read_text(encoding="utf-8") for file in files + own)
        known = {name: value.strip('"').lower() for name, value in re.findall(pattern, text, re.M)}
        for row in (row for row in rows_of(section) if len(row) > 3):
            for name, value in re.findall(r"`(\w+)` ([\w.-]+)", row[column]):
                assert known[name] == value.lower(), (section.partition("\n")[0], name)


def test_every_message_of_troubleshooting_is_one_of_ours():
    said = "\n".join(texts(path) for path in sorted((ROOT / "grpo_fast").rglob("*.py")))
    shown = re.findall(r"^\| `(.+?)` \|", PAGES["troubleshooting"], re.M)
    gap = "\N{HORIZONTAL ELLIPSIS}"

    assert len(shown) >= 20
    missing = [part.strip() for message in shown for part in message.split(gap) if part.strip() not in said]
    assert not missing


def texts(path: Path) -> str:
    """A file's strings, and a new line where a value goes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    parts = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in whole]
    constants = [[part.value for part in found if isinstance(part, ast.Constant)] for found in parts]
    return "\n".join("\n".join(map(str, found)) for found in constants)


LINKED = [*PATHS, *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "llms.txt"))]


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path: Path):
    for link in re.findall(r"\]\((?!http)([^)]*)\)", path.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        target = path.parent / target if target else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], link


def test_every_page_is_in_the_navigation_of_the_site():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]

    assert sorted(re.findall(r"([\w/]+)\.md$", text, re.M)) == sorted(NAMES[1:])


def test_the_notebook_runs_as_it_stands(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make test installs it")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: make test installs it")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: make test installs it")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))

    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    (outcome,) = notebook.cells[-1].outputs
    assert outcome.output_type == "execute_result"


def test_every_file_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|md|toml))`", text))

    assert len(named) > 20
    for path in named:
        assert (ROOT / path).is_file() or (ROOT / "grpo_fast" / path).is_file(), path
