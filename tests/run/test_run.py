"""A run as a process: killed, stopped, resumed, refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed import TCPStore

from grpo_fast.cli import main
from grpo_fast.config.load import load_config
from grpo_fast.config.schema import TrainConfig
from grpo_fast.loop.trainer import Trainer
from grpo_fast.record.checkpoint import CheckpointError, CheckpointStore
from grpo_fast.record.files import read_jsonl
from grpo_fast.rewards import RewardError
from grpo_fast.run import train
from grpo_fast.run.alike import find_checkpoint
from grpo_fast.run.export import trained_policy
from grpo_fast.run.loader import with_steps

FORK = multiprocessing.get_context("fork")  # a process of its own without imports of its own


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Undo what `nohup` does to the process of the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(config_file: Path, run_dir: Path, *arguments: str) -> Any:
    """Run `grpo-fast train` in a process of its own, which prints into the run's log."""

    def run() -> None:
        with run_dir.with_suffix(".log").open("w", buffering=1) as sys.stdout:
            os._exit(main(["train", str(config_file), f"output_dir={run_dir}", *arguments]))

    process = FORK.Process(target=run)
    process.start()
    return process


def wait_for_steps(process: Any, run_dir: Path, steps: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    while process.is_alive() and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= steps):
        time.sleep(0.005)


def steps_of(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(run_dir / "metrics.jsonl")]


def saved(run_dir: Path) -> Any:
    return CheckpointStore(run_dir / "checkpoints").load_latest()


def config_file(toy: dict[str, Any], run_dir: Path, **changes: Any) -> str:
    """The toy's run as a file for the command line."""
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**toy, "output_dir": str(run_dir), **changes}), encoding="utf-8")
    return str(path)


def in_process(toy: dict[str, Any], run_dir: Path, **changes: Any) -> TrainConfig:
    """Two steps of the toy; sections are merged into the toy's."""
    merged = {k: {**toy.get(k, {}), **v} if isinstance(v, dict) and v else v for k, v in changes.items()}
    return TrainConfig(**{**toy, "max_steps": 2, "output_dir": str(run_dir), **merged})


@pytest.fixture
def assert_equal_runs(contents: Any) -> Any:
    def check(one: Path, other: Path) -> None:
        for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "alerts.jsonl"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        assert (saved(one).step, saved(one).state) == (saved(other).step, saved(other).state)
        ends = contents(saved(one)), contents(saved(other))
        for name, tensor in ends[0].items():
            assert tensor.equal(ends[1][name]), name

    return check


@pytest.fixture(scope="module")
def finished(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, each with a checkpoint."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return train(in_process(toy, run_dir, checkpoint={"every": 1}), display=False).run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_killed_stopped_and_resumed_equals_a_whole_one(assert_equal_runs, toy, tmp_path, seed):
    rng = random.Random(seed)
    config = {**toy, "threads": 1, "checkpoint": {"every": 1}}
    config["evaluation"] = {**toy["evaluation"], "every": 3, "size": 8}
    config["logging"] = {"tensorboard": False, "samples_every": 2}
    path, run_dir, whole = tmp_path / "run.yaml", tmp_path / "stopped", tmp_path / "whole"
    path.write_text(yaml.safe_dump(config))

    process = start(path, run_dir, "max_steps=5000")
    # A step takes some 50 ms here, half of it saving: the kill falls anywhere, also into a save.
    wait_for_steps(process, run_dir, rng.randrange(4))
    time.sleep(rng.random() * 0.1)
    process.kill()
    process.join()

    killed_at = len(steps_of(run_dir))
    process = start(path, run_dir, "max_steps=5000", "--resume")
    wait_for_steps(process, run_dir, killed_at + 2)
    process.terminate()
    process.join(600)
    said = run_dir.with_suffix(".log").read_text()
    assert process.exitcode == 143 and "--resume" in said and (run_dir / "report.html").exists(), said
    stopped_at = saved(run_dir).step
    assert steps_of(run_dir) == list(range(stopped_at + 1))

    more = f"max_steps={stopped_at + 2}"
    train(load_config(path, [f"output_dir={run_dir}", more]), resume="latest", display=False)
    train(load_config(path, [f"output_dir={whole}", more]), display=False)
    assert_equal_runs(whole, run_dir)


@pytest.mark.parametrize(
    ("signals", "last_step", "code"),
    [
        (("SIGINT",), 3, 130),  # finishes the step
        (("SIGHUP",), 3, 129),
        (("SIGTERM", "SIGINT"), 2, 130),  # leaves at once
        (("SIGTERM",), 3, 0),  # in the run's last step
    ],
)
def test_a_signal_ends_a_saved_run_with_its_exit_code(
    toy, tmp_path: Path, monkeypatch, capsys, signals: tuple[str, ...], last_step: int, code: int
):
    train_step = Trainer.train_step

    def signalled(self: Trainer) -> Any:
        for name in signals if self.step == 2 else ():
            signal.raise_signal(signal.Signals[name])
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", signalled)
    path = config_file(toy, tmp_path / "run", max_steps=6 if code else 3, evaluation={})
    assert main(["train", path]) == code
    assert saved(tmp_path / "run").step == steps_of(tmp_path / "run")[-1] == last_step
    said = capsys.readouterr()
    assert ("--resume" in said.out) == bool(code)
    assert f"{signals[0]}: the step is finished and saved first" in said.err
    assert ("interrupt again to leave at once" in said.err) == (signals[0] == "SIGINT")


def test_a_run_whose_terminal_is_closed_saves_and_leaves(toy, tmp_path: Path):
    run_dir, path = tmp_path / "run", config_file(toy, tmp_path / "run", max_steps=5000, threads=1)
    child, terminal = pty.fork()
    if child == 0:
        sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w")  # noqa: SIM115
        os.environ["TERM"] = "xterm"
        os._exit(main(["train", path]))
    said = b""
    while len(steps_of(run_dir)) < 3:
        said += os.read(terminal, 2**16)  # or it would wait for its reader
    os.close(terminal)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 129
    assert "━".encode() in said  # the bar of a terminal
    assert saved(run_dir).step == steps_of(run_dir)[-1] >= 2


def test_a_run_under_nohup_ignores_a_hangup(toy, tmp_path: Path, monkeypatch):
    train_step = Trainer.train_step

    def hung_up(self: Trainer) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", hung_up)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = in_process(toy, tmp_path / "run", max_steps=1, evaluation={})
    assert train(config, display=False).stopped_by is None


def test_torchrun_restarts_a_run_from_its_newest_checkpoint(toy, tmp_path: Path, finished: Path, monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in {**told, "TORCHELASTIC_RUN_ID": 1, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    config = in_process(toy, tmp_path / "run", max_steps=3, checkpoint={"every": 1})

    def lost(self: Trainer) -> Any:
        if self.step == 2:
            raise ValueError("lost")
        return train_step(self)

    train_step = Trainer.train_step
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="lost"):
        patch.setattr(Trainer, "train_step", lost)
        train(config, display=False)
    before = saved(tmp_path / "run").path.stat().st_mtime_ns
    train(config, display=False)

    assert steps_of(tmp_path / "run") == [0, 1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").stat().st_mtime_ns == before
    other = shutil.copytree(finished, tmp_path / "other")
    assert train(in_process(toy, other, max_steps=1), display=False).run_dir == tmp_path / "other-2"
    assert train(in_process(toy, other, max_steps=2), display=False).run_dir == tmp_path / "other-2"
    assert steps_of(tmp_path / "other-2") == [0, 1, 2]


def test_a_new_run_leaves_another_ones_folder_alone(toy, run_dir: Path, capsys):
    before, once = steps_of(run_dir), config_file(toy, run_dir, max_steps=1, evaluation={})
    second, third = (run_dir.with_name(f"{run_dir.name}-{number}") for number in (2, 3))

    assert main(["train", once]) == 0
    assert f"{run_dir} holds another run, so this one is in {second}" in capsys.readouterr().out
    assert main(["train", once]) == main(["train", once, "--resume", "max_steps=2"]) == 0
    assert [steps_of(folder) for folder in (run_dir, second, third)] == [before, [0, 1], [0, 1, 2]]

    assert main(["train", str(run_dir), "--resume", "max_steps=3"]) == 0  # the folder that is named
    assert steps_of(run_dir) == [*before, 3] and len(steps_of(third)) == 3
    assert main(["train", once, "--overwrite"]) == 0
    assert steps_of(run_dir) == [0, 1] and saved(run_dir).step == 1
    assert main(["train", once, "--resume", "max_steps=2"]) == 0
    assert steps_of(run_dir) == [0, 1, 2]
    assert main(["train", once, "--overwrite", "--resume"]) == 2

    assert main(["train", once]) == 0
    shutil.rmtree(fourth := run_dir.with_name(f"{run_dir.name}-4"))
    assert main(["train", once, "--resume", "max_steps=3"]) == 0
    assert steps_of(run_dir) == [0, 1, 2, 3] and not fourth.exists()


@pytest.mark.parametrize(
    ("changes", "resume", "said"),
    [
        ({"seed": 5, "loss": {"beta": 0.1}}, "latest", r"seed was 0, is 5; loss\.beta was 0\.0, is 0\.1"),
        ({"rewards": [{"reward": "length"}]}, "latest", r"rewards\.0\.reward was '.*near_w7', is 'length'"),
        ({"model": {"lora": {"r": 2}}}, "latest", r"model\.lora was None, is {'r': 2"),
        ({"max_steps": 1}, "latest", r"max_steps = 1, and .*step-00000002 has more"),
        ({}, "other/checkpoints/step-00000001", "another run"),
        ({}, "step-00000007", "is no checkpoint"),
    ],
)
def test_another_run_is_not_continued_and_nothing_is_changed(
    assert_equal_runs, toy, run_dir: Path, finished: Path, monkeypatch, changes, resume, said
):
    monkeypatch.chdir(run_dir.parent)
    if resume and resume.startswith("other"):
        shutil.copytree(finished, "other")
    with pytest.raises(CheckpointError, match=said):
        train(in_process(toy, run_dir, **changes), resume=resume, display=False)
    assert_equal_runs(run_dir, finished)


def test_a_quantized_base_and_8_bit_states_resume_to_the_bit(assert_equal_runs, toy, tmp_path: Path):
    lora = {"dtype": "bfloat16", "quantization": "nf4", "lora": {"r": 128}}  # enough for moments of 8 bits
    sections = {"model": lora, "loss": {"beta": 0.1}, "evaluation": {"every": 1}}
    sections["optimizer"] = {"kind": "adamw_8bit", "stochastic_rounding": True}
    whole, resumed = (in_process(toy, tmp_path / name, **sections) for name in ("whole", "resumed"))

    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step for each shape
        train(whole, display=False)
        train(resumed.model_copy(update={"max_steps": 1}), display=False)
        train(resumed, resume="latest", display=False)

    assert_equal_runs(tmp_path / "whole", tmp_path / "resumed")
    policy, step = trained_policy(resumed, tmp_path / "resumed")
    assert policy.quantized and step == 2


def test_a_resumed_run_says_from_where_and_what_has_changed(toy, run_dir: Path, capsys):
    changes = {"max_steps": 3, "optimizer": {"learning_rate": 1e-3}, "evaluation": toy["evaluation"]}
    changes |= {"rewards": [{**toy["rewards"][0], "on_error": "skip"}], "rollout": {"max_batch_tokens": 900}}

    train(in_process(toy, run_dir, **changes), resume="latest")

    said = " ".join(capsys.readouterr().out.split())
    assert f"resumed after step 2 from {run_dir / 'checkpoints' / 'step-00000002'}" in said
    assert "max_steps was 2, is 3" in said and "optimizer.learning_rate was 0.003, is 0.001" in said
    assert "rewards.0.on_error was 'fail', is 'skip'" in said
    assert steps_of(run_dir) == [0, 1, 2, 3]
    train(in_process(toy, run_dir, **changes), resume="latest")
    assert "all steps are done, raise max_steps" in " ".join(capsys.readouterr().out.split())


def test_a_run_goes_on_where_its_data_has_been_moved_to(toy, run_dir: Path, tmp_path: Path):
    data = tmp_path / "first" / "prompts.jsonl"
    data.parent.mkdir()
    data.write_text(Path(toy["dataset"]["source"]).read_text())
    (run_dir / "config.yaml").write_text(
        (run_dir / "config.yaml").read_text().replace(toy["dataset"]["source"], str(data))
    )
    config = in_process(toy, run_dir, max_steps=3, dataset={"source": str(tmp_path / "second/prompts.jsonl")})
    shutil.copytree(data.parent, tmp_path / "second")
    with pytest.raises(CheckpointError, match=r"dataset\.source was"):
        train(config, resume="latest", display=False)
    shutil.rmtree(data.parent)
    assert train(config, resume="latest", display=False).stopped_by is None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda lines: None, r"lacks 3 of the 3 steps .* \(0, 1, 2\)"),
        (lambda lines: [], r"lacks 3 of the 3 steps"),
        (lambda lines: [lines[0], lines[2]], r"lacks 1 of the 3 steps .* \(1\)"),
        (lambda lines: [*lines, lines[1]], r"repeats 1 of the 3 steps .* \(1\)"),
        (lambda lines: lines, None),
    ],
)
def test_a_resumed_run_warns_of_steps_lost_from_its_metrics(toy, run_dir: Path, caplog, damage, problem):
    metrics = run_dir / "metrics.jsonl"
    lines = damage(metrics.read_text().splitlines(keepends=True))
    metrics.unlink() if lines is None else metrics.write_text("".join(lines))
    store, config = CheckpointStore(run_dir / "checkpoints"), load_config(run_dir)
    found, _ = find_checkpoint(run_dir, store, config, "latest", {})
    assert found is not None and bool(re.search(problem or "(?!)", caplog.text)) == bool(problem)


REMOVES = """
import os, shutil
from grpo_fast import Callback
class Mine(Callback):
    def on_train_begin(self, step, config, policy):
        self.folder = config.output_dir
        os.chdir("/")
    def on_step_end(self, step, metrics):
        if step == 2:
            {what}
"""


@pytest.mark.parametrize(
    "what", ["os.remove(self.folder + '/metrics.jsonl')", "shutil.rmtree(self.folder)", "0"]
)
def test_a_run_stays_in_its_folder_and_ends_where_that_is_removed(
    toy, tmp_path: Path, monkeypatch, capsys, what
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REMOVES.format(what=what))
    file = config_file(toy, tmp_path / "run", evaluation={}, callbacks=["mine.py:Mine"], max_steps=2)
    code = main(["train", file, "output_dir=run"])
    assert code == (0 if what == "0" else 1)
    assert code == 0 or "was removed during the run" in capsys.readouterr().err
    if what != "shutil.rmtree(self.folder)":
        assert saved(tmp_path / "run").step == 2
    if code == 0:
        monkeypatch.chdir("/")
        assert load_config(tmp_path / "run").callbacks == [f"{tmp_path}/mine.py:Mine"]


def test_a_resumed_run_warns_of_code_that_has_changed(toy, tmp_path: Path, caplog, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, reward in (("own", "own.py:f"), ("own_module", "own_module:f")):
        code = tmp_path / f"{name}.py"
        code.write_text("def f(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
        path = reward.replace("own.py", str(code))
        file = config_file(toy, tmp_path / name, max_steps=1, rewards=[{"reward": path}], evaluation={})
        assert main(["train", file]) == 0
        code.write_text(f"{code.read_text()}# edited\n")

        for steps, warnings in ((2, 1), (3, 0)):
            caplog.clear()
            assert main(["train", file, "--resume", f"max_steps={steps}"]) == 0
            assert caplog.text.count(f"{path.removesuffix(':f')} has changed since") == warnings


COUNTING = """from pathlib import Path
def made(row):
    with open(Path(__file__).with_name("calls"), "a") as file:
        file.write(".")
    return {"prompt": f"w2 {row['words']}", "words": None}
"""


def test_a_transform_is_called_once_a_row(toy, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, calls = tmp_path / "own.py", tmp_path / "calls"
    code.write_text(COUNTING)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"words": "w9 {name}"}}\n{{"words": "w8 {name}"}}\n')
    file = config_file(
        {key: value for key, value in toy.items() if key != "max_steps"},
        tmp_path / "run",
        dataset={"source": "train.jsonl", "transform": "own.py:made"},
        evaluation={"dataset": {"source": "test.jsonl"}},
        **{"epochs": 2, "prompts_per_step": 1},
    )

    assert main(["preview", file, "--num-prompts", "1"]) == 0
    assert "  before\n  | words: 'w9 train'\n  after\n  | prompt: 'w2 w9 train'\n" in capsys.readouterr().out
    calls.unlink()
    assert main(["train", file]) == 0
    assert calls.read_text() == ".." * 2  # though the epochs are counted first
    assert load_config(tmp_path / "run").dataset.transform == f"{code}:made"
    (tmp_path / "other.py").write_text(COUNTING)
    assert main(["train", file, "--resume", "dataset.transform=other.py:made"]) == 1
    assert "dataset.transform was" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_resumes_with_any_settings(toy, tmp_path: Path, capsys):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def wrong(completions, **columns):\n    return [1.0]\n")
    with pytest.raises(RewardError, match="return one each"):
        train(in_process(toy, tmp_path / "run", rewards=[{"reward": f"{rewards}:wrong"}]))
    assert "RewardError" not in capsys.readouterr().out  # nothing is to be saved, and the error says the rest

    train(in_process(toy, tmp_path / "run"), resume="latest", display=False)

    assert steps_of(tmp_path / "run") == [0, 1, 2] and saved(tmp_path / "run").step == 2


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(assert_equal_runs, toy, run_dir, finished):
    damaged = run_dir / "checkpoints" / "step-00000002"
    (tensors,) = damaged.glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])

    train(in_process(toy, run_dir, checkpoint={"every": 1}), resume="latest", display=False)

    assert_equal_runs(run_dir, finished)


def test_a_run_whose_checkpoints_are_gone_keeps_its_records(toy, run_dir: Path):
    shutil.rmtree(run_dir / "checkpoints")
    for stopped_early in (False, True):
        if stopped_early:
            (run_dir / "report.html").unlink()
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl has 2 steps, and .* no checkpoint"):
            train(in_process(toy, run_dir, max_steps=3), resume="latest", display=False)
    assert steps_of(run_dir) == [0, 1, 2]


def test_epochs_become_steps_by_the_prompts_that_are_trained_on(toy, tmp_path: Path):
    rows = [json.dumps({"prompt": f"w{2 + i} w3"}) for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    held_out = {"dataset": {"source": str(tmp_path / "rows.jsonl"), "size": 2}, "threshold": 0.5}
    data = {"dataset": {"source": str(tmp_path / "rows.jsonl")}, "evaluation": held_out}
    path = config_file({**toy, **data}, tmp_path / "run", prompts_per_step=4)
    train(load_config(path, ["epochs=1.5"]), display=False)

    resumed = train(load_config(path, ["epochs=2"]), resume="latest", display=False)  # 20 of 10 prompts

    assert steps_of(resumed.run_dir) == [0, 1, 2, 3, 4, 5]
    config = load_config(resumed.run_dir)
    assert (config.max_steps, config.epochs) == (5, None)
    assert with_steps(load_config(path, ["epochs=1.1", "prompts_per_step=1"])).max_steps == 11


def test_a_copied_or_moved_run_goes_on_where_it_lies_now(toy, run_dir: Path, finished: Path):
    before = steps_of(finished)

    assert main(["train", str(run_dir), "max_steps=3", "--resume"]) == 0

    assert steps_of(run_dir) == [0, 1, 2, 3] and steps_of(finished) == before
    assert load_config(run_dir / "checkpoints" / "step-00000003").output_dir == str(run_dir)
    assert load_config(run_dir, ["output_dir=elsewhere"]).output_dir == "elsewhere"
    (finished.parent / "config.yaml").write_text((finished / "config.yaml").read_text())
    assert load_config(finished.parent).output_dir == str(finished)  # a folder that is no run
    run_dir.rename(run_dir.with_name("moved"))
    with pytest.raises(CheckpointError, match="name the folder that the run has been moved to"):
        train(in_process(toy, run_dir), resume="latest", display=False)


def test_a_run_resumed_at_an_earlier_step_forgets_later_ones(toy, run_dir: Path, monkeypatch):
    config = in_process(toy, run_dir, max_steps=4)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Trainer, "train_step", lambda self: {}["stopped before anything is saved"])
        train(config, resume=str(run_dir / "checkpoints" / "step-00000001"), display=False)

    train(config, resume="latest", display=False)

    assert steps_of(run_dir) == [0, 1, 2, 3, 4]


def test_a_mistake_shows_before_weights_are_read(toy, tmp_path: Path, monkeypatch):
    for missing in ("vllm", "wandb"):
        monkeypatch.setitem(sys.modules, missing, None)
    with monkeypatch.context() as patch:
        patch.setattr("grpo_fast.run.build.load_policy", lambda *_, **__: pytest.fail("weights were read"))
        for mistake, said in (
            ({"model": {"path": "./nowhere"}}, "./nowhere"),
            ({"dataset": {"source": "nowhere.jsonl"}}, "dataset.source = 'nowhere.jsonl'"),
            ({"rewards": [{"reward": "nowhere.py:f"}]}, "nowhere.py:f"),
            ({"logging": {"wandb": True}}, "logging.wandb"),
            ({"evaluation": {"reward": "near_w8"}}, "evaluation.reward = 'near_w8'"),
            ({"loss": {"loss_type": "nowhere:loss"}}, "loss_type = 'nowhere:loss'"),
        ):
            with pytest.raises((OSError, ValueError, ImportError)) as raised:
                train(in_process(toy, tmp_path / "run", **mistake), display=False)
            assert said in str(raised.value)
            assert not (tmp_path / "run" / "config.yaml").exists()
    with pytest.raises((ValueError, ImportError), match="vllm"):  # fails when its engine starts
        train(in_process(toy, tmp_path / "run", rollout={"engine": "vllm"}), display=False)

    train(in_process(toy, tmp_path / "run", max_steps=1, evaluation={}), display=False)
    assert steps_of(tmp_path / "run") == [0, 1]


def test_eval_scores_a_checkpoints_weights_and_writes_a_record(finished: Path, tmp_path: Path, capsys):
    checkpoint, out = finished / "checkpoints" / "step-00000001", tmp_path / "out.json"
    assert main(["eval", str(checkpoint), "--k", "1", "2", "--output", str(out)]) == 0
    shown, record = capsys.readouterr().out, json.loads(out.read_text())
    assert f"{checkpoint}, step 1; " in shown and "held_out.jsonl: 10 prompts" in shown
    assert (record["run"], record["step"], record["n"]) == (str(checkpoint), 1, 10)
    assert record["dataset"]["source"].endswith("held_out.jsonl") and record["reward"] == "near_w7"
    assert (record["engine"], record["num_samples"]) == ("transformers", 2)
    assert (record["sampling"]["temperature"], record["sampling"]["max_completion_length"]) == (1.0, 8)
    assert {"grpo-fast", "torch", "transformers"} <= set(record["versions"])
    assert all(1 <= n <= 8 for question in record["questions"] for n in question["tokens"])


def test_eval_says_that_it_scores_the_questions_that_are_trained_on(
    toy, finished: Path, tmp_path: Path, capsys, monkeypatch
):
    alone, out = config_file({**toy, "evaluation": {}}, tmp_path / "alone"), tmp_path / "out.json"
    assert main(["eval", alone, "--output", str(out)]) == main(["eval", str(finished)]) == 0
    said = capsys.readouterr().out
    assert said.count("not held out: there is no evaluation.dataset") == 1
    assert json.loads(out.read_text())["held_out"] is False


def test_weights_of_another_model_or_none_are_not_evaluated(run_dir: Path, capsys):
    assert main(["eval", str(run_dir), "model.lora={r: 2}"]) == 1
    assert "the saved weights do not belong to this model" in capsys.readouterr().err
    shutil.rmtree(run_dir / "checkpoints")
    assert main(["eval", str(run_dir)]) == 1
    assert "has no checkpoint yet" in capsys.readouterr().err
