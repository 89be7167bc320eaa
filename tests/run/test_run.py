"""A run: its stages built, its life as a process: killed, stopped, resumed, refused."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pty
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import TCPStore

import grpo_fast
from grpo_fast.cli import main
from grpo_fast.config.load import load_config
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.stages import resolve_stages
from grpo_fast.data import load_prompts
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.sampler import GroupSampler
from grpo_fast.head import reference
from grpo_fast.loop.trainer import StageParts, Trainer
from grpo_fast.policy import load_tokenizer
from grpo_fast.record.checkpoint import CheckpointError, CheckpointSaveError, CheckpointStore
from grpo_fast.record.files import read_jsonl
from grpo_fast.rewards import RewardError
from grpo_fast.rewards.types import Log
from grpo_fast.run import train
from grpo_fast.run.alike import is_changeable
from grpo_fast.run.build import build_stages, with_steps
from grpo_fast.run.export import trained_policy

FRAMES = 13  # of ours from the command to the kernel
FORK = multiprocessing.get_context("fork")  # a process of its own without imports of its own


def start(config_file: Path, run_dir: Path, *arguments: str) -> Any:
    """`grpo-fast train` in a process of its own, which prints into the run's log."""

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


def test_a_run_killed_at_a_random_moment_then_told_to_stop_and_resumed_equals_one_that_was_not(
    assert_equal_runs, toy: dict[str, Any], tmp_path: Path, seed: int
):
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

    killed_at = len(steps_of(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0
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
        (("SIGTERM",), 3, 143),
        (("SIGHUP",), 3, 129),
        (("SIGINT", "SIGINT"), 2, 130),  # leaves at once
        (("SIGTERM", "SIGINT"), 2, 130),
        (("SIGTERM",), 3, 0),  # in the run's last step
    ],
)
def test_a_run_told_to_stop_saves_and_leaves_with_the_signal_s_code(
    toy, tmp_path: Path, monkeypatch, capsys, signals: tuple[str, ...], last_step: int, code: int
):
    train_step = Trainer.train_step

    def told(self: Trainer) -> Any:
        for name in signals if self.step == 2 else ():
            signal.raise_signal(signal.Signals[name])
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", told)
    assert main(["train", config_file(toy, tmp_path / "run", max_steps=6 if code else 3)]) == code
    assert saved(tmp_path / "run").step == steps_of(tmp_path / "run")[-1] == last_step
    assert ("--resume" in capsys.readouterr().out) == bool(code)


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


def test_a_run_started_with_nohup_does_not_hear_of_the_terminal(toy, tmp_path: Path, monkeypatch):
    train_step = Trainer.train_step

    def hung_up(self: Trainer) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(in_process(toy, tmp_path / "run"), display=False).stopped_by is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_torchrun_starts_a_run_again_from_its_newest_checkpoint_and_no_other_run(
    toy, tmp_path: Path, finished: Path, monkeypatch
):
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
    for _ in range(2):
        with pytest.raises(CheckpointError, match="already holds a run"):
            train(in_process(toy, finished), display=False)


def test_few_frames_of_ours_lie_between_the_command_and_the_head_s_forward(toy, tmp_path, monkeypatch):
    package, forward, stacks = Path(grpo_fast.__file__).parent, reference.forward, []

    def seen(*args: Any, **options: Any) -> Any:
        frames = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
        stacks.append([code.co_name for code in frames if package in Path(code.co_filename).parents][::-1])
        return forward(*args, **options)

    monkeypatch.setattr(reference, "forward", seen)
    assert main(["train", config_file(toy, tmp_path / "run", max_steps=1, evaluation={})]) == 0
    to_gradient = stacks[-1]
    assert to_gradient[:4] == ["main", "train", "train", "train_step"]
    assert len(to_gradient) + 1 <= FRAMES, to_gradient  # the forward, in the kernel's stead, is one


def config_file(toy: dict[str, Any], run_dir: Path, **changes: Any) -> str:
    """The toy's run as a file for the command line."""
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**toy, "output_dir": str(run_dir), **changes}), encoding="utf-8")
    return str(path)


def in_process(toy: dict[str, Any], run_dir: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**toy, "max_steps": 2, "output_dir": str(run_dir), **changes})


@pytest.fixture(scope="module")
def finished(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, each with a checkpoint."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return train(in_process(toy, run_dir, checkpoint={"every": 1}), display=False).run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {"weight_decay": 0.5}}, r"optimizer\.weight_decay was 0\.0, is 0\.5"),
        ({"rewards": [{"reward": "length"}]}, r"rewards\.0\.reward was '.*near_w7', is 'length'"),
        ({"model": {"lora": {"r": 2}}}, r"model\.lora was None, is {'r': 2"),
        ({"seed": 5, "loss": {"beta": 0.1}}, r"seed was 0, is 5; loss\.beta was 0\.0, is 0\.1"),
    ],
)
def test_a_run_is_resumed_with_its_own_configuration_only(
    assert_equal_runs, toy, run_dir: Path, finished: Path, changes, said
):
    changes = {k: {**toy.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}
    with pytest.raises(CheckpointError, match=said):
        train(in_process(toy, run_dir, **changes), resume="latest", display=False)
    assert_equal_runs(run_dir, finished)


def test_a_quantised_base_and_state_of_few_bits_resume_to_the_bit(assert_equal_runs, toy, tmp_path: Path):
    lora = {"dtype": "bfloat16", "quantization": "nf4", "lora": {"r": 128}}  # enough for moments of 8 bits
    sections = {"model": toy["model"] | lora, "loss": {"beta": 0.1}}
    sections["optimizer"] = toy["optimizer"] | {"kind": "adamw_8bit", "stochastic_rounding": True}
    sections["evaluation"] = {**toy["evaluation"], "every": 1}
    whole, resumed = (in_process(toy, tmp_path / name, **sections) for name in ("whole", "resumed"))

    train(whole, display=False)
    train(resumed.model_copy(update={"max_steps": 1}), display=False)
    train(resumed, resume="latest", display=False)

    assert_equal_runs(tmp_path / "whole", tmp_path / "resumed")
    policy, step = trained_policy(resumed, tmp_path / "resumed")
    assert policy.quantized and step == 2


def test_a_key_is_changeable_by_its_whole_name():
    assert is_changeable("memory") and is_changeable("rollout.vllm.max_sequences")
    assert not is_changeable("optimizer.learning_rate_x") and not is_changeable("rollout.vllm_x")


def test_a_resumed_run_says_from_where_and_what_has_changed(toy, run_dir: Path, capsys):
    with pytest.raises(CheckpointError, match="--resume"):
        train(in_process(toy, run_dir), display=False)

    train(in_process(toy, run_dir, max_steps=3, optimizer={"learning_rate": 1e-3}), resume="latest")

    said = " ".join(capsys.readouterr().out.split())
    assert f"resumed after step 2 from {run_dir / 'checkpoints' / 'step-00000002'}" in said
    assert "max_steps was 2, is 3; optimizer.learning_rate was 0.003, is 0.001" in said
    assert steps_of(run_dir) == [0, 1, 2, 3]
    train(in_process(toy, run_dir, max_steps=3, optimizer={"learning_rate": 1e-3}), resume="latest")
    assert "all steps are done, raise max_steps" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(CheckpointError, match=r"max_steps = 2, and .*step-00000003 has more"):
        train(in_process(toy, run_dir, optimizer={"learning_rate": 1e-3}), resume="latest")


def test_a_resumed_run_asks_before_it_goes_on_with_code_that_has_changed(toy, tmp_path: Path, capsys):
    reward, path = tmp_path / "own.py", tmp_path / "run.yaml"
    reward.write_text("def own(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    changes = {"max_steps": 1, "output_dir": str(tmp_path / "run"), "rewards": [{"reward": f"{reward}:own"}]}
    path.write_text(yaml.safe_dump(toy | changes))
    assert main(["train", str(path)]) == 0
    with reward.open("a") as file:
        file.write("# edited\n")
    resumed = ["train", str(path), "--resume", "--changed-code"]

    assert main(["train", str(path), "--resume"]) == 1
    assert f"other code ({reward} has changed): bring back" in capsys.readouterr().err
    assert main([*resumed, "max_steps=2"]) == 0
    assert f"{reward} has changed" in capsys.readouterr().out.replace("\n", "")
    assert main(["train", str(path), "max_steps=3", "--resume"]) == 0
    assert "has changed" not in capsys.readouterr().out
    assert main(["train", str(path), "--changed-code"]) == 2


def test_a_run_that_failed_before_its_first_checkpoint_goes_on_with_a_mended_configuration(
    toy, tmp_path: Path, capsys
):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def wrong(completions, **columns):\n    return [1.0]\n")
    with pytest.raises(RewardError, match="return one each"):
        train(in_process(toy, tmp_path / "run", rewards=[{"reward": f"{rewards}:wrong"}]))
    assert (
        "RewardError" not in capsys.readouterr().out
    )  # there is nothing to save, and the error says the rest

    train(in_process(toy, tmp_path / "run"), resume="latest", display=False)

    assert steps_of(tmp_path / "run") == [0, 1, 2]
    assert saved(tmp_path / "run").step == 2


def test_a_run_goes_on_from_the_one_before_a_damaged_checkpoint_as_if_that_had_never_been(
    assert_equal_runs, toy, run_dir: Path, finished: Path
):
    damaged = run_dir / "checkpoints" / "step-00000002"
    (tensors,) = damaged.glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])

    train(in_process(toy, run_dir, checkpoint={"every": 1}), resume="latest", display=False)

    assert_equal_runs(run_dir, finished)
    assert damaged.with_suffix(".damaged").is_dir()


@pytest.mark.parametrize("torn", ["half", "zeros"])
def test_a_run_whose_last_line_a_power_cut_has_torn_goes_on(toy, run_dir: Path, caplog, torn: str):
    for name in ("metrics.jsonl", "timings.jsonl"):
        *lines, last = (run_dir / name).read_bytes().splitlines(keepends=True)
        kept = last[: len(last) // 2] if torn == "half" else bytes(len(last) - 1) + b"\n"
        (run_dir / name).write_bytes(b"".join([*lines, kept]))

    train(in_process(toy, run_dir, max_steps=3), resume="latest", display=False)

    assert steps_of(run_dir) == [0, 1, 3]
    assert "metrics.jsonl" in caplog.text and "lost" in caplog.text


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
    (run_dir / "inputs").mkdir()
    kept = shutil.copy(toy["dataset"]["source"], run_dir / "inputs" / "dataset-12ab.jsonl")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["dataset"]["source"] = str(finished / "inputs" / "dataset-12ab.jsonl")  # as a call from Python
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))

    assert main(["train", str(run_dir), "max_steps=3", "--resume"]) == 0

    assert steps_of(run_dir) == [0, 1, 2, 3] and steps_of(finished) == before
    assert load_config(run_dir).dataset.source == str(kept)
    assert load_config(run_dir / "checkpoints" / "step-00000003").output_dir == str(run_dir)
    assert load_config(run_dir, ["output_dir=elsewhere"]).output_dir == "elsewhere"
    (finished.parent / "config.yaml").write_text((finished / "config.yaml").read_text())
    assert load_config(finished.parent).output_dir == str(finished)  # a folder that is no run
    run_dir.rename(run_dir.with_name("moved"))
    with pytest.raises(CheckpointError, match="name the folder that the run has been moved to"):
        train(in_process(toy, run_dir), resume="latest", display=False)


def test_resumed_at_an_earlier_step_a_run_forgets_the_later_ones_at_once(toy, run_dir: Path, monkeypatch):
    config = in_process(toy, run_dir, max_steps=4)
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Trainer, "train_step", lambda self: {}["stopped before anything is saved"])
        train(config, resume=str(run_dir / "checkpoints" / "step-00000001"), display=False)

    train(config, resume="latest", display=False)

    assert steps_of(run_dir) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("resume", "said"),
    [("other/checkpoints/step-00000001", "another run"), ("step-00000007", "no checkpoint")],
)
def test_a_checkpoint_that_is_not_the_run_s_is_refused(
    assert_equal_runs, toy, run_dir: Path, finished: Path, monkeypatch, resume: str, said: str
):
    monkeypatch.chdir(run_dir.parent)
    shutil.copytree(finished, "other")
    with pytest.raises(CheckpointError, match=said):
        train(in_process(toy, run_dir, max_steps=4), resume=resume, display=False)
    assert_equal_runs(run_dir, finished)


def test_starts_that_failed_leave_a_folder_to_start_in(toy, tmp_path: Path, monkeypatch):
    for missing in ("vllm", "wandb"):
        monkeypatch.setitem(sys.modules, missing, None)
    for mistake in (
        {"model": {"path": "./nowhere"}},
        {"dataset": {"source": "nowhere.jsonl"}},
        {"rewards": [{"reward": "nowhere.py:f"}]},
        {"rollout": {"engine": "vllm"}},
        {"logging": {"wandb": True}},
    ):
        wrong = {k: {**toy.get(k, {}), **v} if isinstance(v, dict) else v for k, v in mistake.items()}
        with pytest.raises((OSError, ValueError, ImportError)):
            train(in_process(toy, tmp_path / "run", **wrong), display=False)

    train(in_process(toy, tmp_path / "run", max_steps=1, evaluation={}), display=False)

    assert steps_of(tmp_path / "run") == [0, 1]


def test_eval_of_a_checkpoint_takes_its_weights_and_writes_down_what_was_measured(
    finished: Path, tmp_path: Path, capsys
):
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


def test_eval_says_that_it_scores_the_questions_that_are_trained_on_and_finds_out_early_what_it_cannot_write(
    toy, finished: Path, tmp_path: Path, capsys, monkeypatch
):
    alone, out = config_file({**toy, "evaluation": {}}, tmp_path / "alone"), tmp_path / "out.json"
    assert main(["eval", alone, "--output", str(out)]) == main(["eval", str(finished)]) == 0
    said = capsys.readouterr().out
    assert said.count("not held out: there is no evaluation.dataset") == 1
    assert json.loads(out.read_text())["held_out"] is False

    (tmp_path / "link.json").symlink_to("/proc/no/file")
    monkeypatch.setattr("grpo_fast.cli.questions.Parts.load", lambda *_, **__: pytest.fail("work was done"))
    assert main(["eval", alone, "--output", str(tmp_path / "link.json")]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_run_s_weights_go_into_its_own_model_which_is_not_evaluated_without_them(run_dir: Path, capsys):
    config = load_config(run_dir / "config.yaml", ["model.lora={r: 2}"])
    with pytest.raises(ValueError, match="the saved weights do not belong to this model"):
        trained_policy(config, run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    assert main(["eval", str(run_dir)]) == 1
    assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": {"source": "nowhere.jsonl"}}, "dataset.source = 'nowhere.jsonl': there is no such file"),
        ({"evaluation": {"reward": "near_w8"}}, "evaluation.reward = 'near_w8'.*did you mean 'near_w7'"),
        ({"loss": {"loss_type": "nowhere:loss"}}, "loss_type = 'nowhere:loss' cannot be imported"),
        ({"optimizer": {"kind": "adamw_8bit"}}, r"adamw_8bit', which needs bitsandbytes: pip install 'grpo"),
    ],
)
def test_a_mistake_shows_before_weights_are_read(toy, tmp_path: Path, monkeypatch, changes, said):
    monkeypatch.setattr("grpo_fast.run.build.load_policy", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr("grpo_fast.policy.quantization.find_spec", lambda _: None)
    with pytest.raises((ValueError, FileNotFoundError, ImportError), match=said):
        train(in_process(toy, tmp_path / "run", **changes), display=False)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_unwritable_directory_is_reported_before_anything_is_loaded(toy, tmp_path: Path):
    (tmp_path / "file").write_text("")
    config = in_process(toy, tmp_path / "file" / "run", model={"path": str(tmp_path / "no-model")})
    with pytest.raises(OSError, match="cannot write"):
        train(config, display=False)


def test_a_failed_save_in_the_middle_costs_a_message_and_not_the_run(
    toy, tmp_path: Path, monkeypatch, capsys
):
    save, attempts = CheckpointStore.save, []

    def full_once(self, step, *args, **kwargs):
        attempts.append(step)
        if step == 1:
            raise CheckpointSaveError("no space left on device")
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", full_once)
    train(in_process(toy, tmp_path / "run", checkpoint={"every": 1}))
    assert attempts == [1, 2]
    assert saved(tmp_path / "run").step == 2
    assert "no space left" in capsys.readouterr().out


@pytest.fixture
def build(toy: dict[str, Any]):
    def build(*overrides: dict[str, Any], **changes: Any) -> tuple[StageParts, ...]:
        stages = [{"name": f"s{i}", "steps": 2, "overrides": part} for i, part in enumerate(overrides)]
        config = TrainConfig(**{**toy, "max_steps": 2 * max(1, len(stages)), "stages": stages, **changes})
        tokenizer = load_tokenizer(config.model)
        held_out = load_prompts(config.evaluation.dataset, tokenizer)
        return build_stages(resolve_stages(config), tokenizer, held_out)

    return build


def test_what_a_stage_leaves_goes_on_as_the_same_object(build, tmp_path: Path):
    (tmp_path / "more.py").write_text(
        "def other(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    rewards = {"rewards": [{"reward": f"{tmp_path / 'more.py'}:other"}]}
    grouped = {"groups": {"strategy": "similarity"}, "adaptive_weights": None}

    first, second, third, fourth = build(
        {}, {"loss": {"beta": 0.1}}, rewards, grouped, adaptive_weights={"method": "inverse_std"}
    )

    assert second.prompts is first.prompts and second.rewards is first.rewards
    assert second.adaptive_weights is first.adaptive_weights is not None
    assert second.stage.config.loss.beta == 0.1 and first.stage.config.loss.beta == 0
    # Other rewards keep the order of the prompts.
    assert third.prompts is first.prompts and third.rewards.names == ("other",)
    assert third.adaptive_weights is not first.adaptive_weights and fourth.adaptive_weights is None
    # Another grouping takes the same prompts in another order.
    assert isinstance(fourth.prompts, GroupSampler) and fourth.prompts.dataset is first.prompts.dataset
    assert fourth.prompts.seed != first.prompts.seed
    # Pass rates are of the rewards that they were measured by.
    measured, anew = build({}, rewards, curriculum={})
    assert isinstance(anew.prompts, DifficultySampler) and anew.prompts is not measured.prompts


def test_a_first_stage_draws_exactly_as_a_run_without_stages(build):
    (staged,), (plain,) = build({}), build()
    for _ in range(12):
        assert staged.prompts.next() == plain.prompts.next()


def test_held_out_questions_stay_out_of_every_stage(build, toy):
    held_out = {"dataset": {**toy["dataset"], "size": 4}}
    first, second = build({}, {"dataset": {"source": toy["dataset"]["source"]}}, evaluation=held_out)
    everything = load_prompts(TrainConfig(**toy).dataset, load_tokenizer(TrainConfig(**toy).model))
    questions = {prompt.prompt for prompt in everything[:4]}
    for parts in (first, second):
        left = {prompt.prompt for prompt in parts.prompts.dataset}
        assert left == {prompt.prompt for prompt in everything} - questions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rewards": [{"reward": "exact_mach"}]}, "stage 's1': .*did you mean 'exact_match'"),
        ({"groups": {"strategy": "prefix"}}, "stage 's1': .*use another strategy"),
        ({"curriculum": {"pass_rate_column": "rate"}}, "stage 's1': .*is no column of the dataset"),
        ({"prompts_per_step": 1000}, "stage 's1': a batch of 1000 prompts cannot be drawn"),
    ],
)
def test_a_mistake_in_a_later_stage_is_told_at_the_start_with_its_name(build, overrides, message):
    with pytest.raises(ValueError, match=message):
        build({}, overrides)


JUDGE = """
def judge(completions, api_key, url, max_new_tokens, headers, **columns):
    assert (api_key, url) == ("sk-1234", "https://me:pass99@host/v1?token=tok77"), (api_key, url)
    assert headers == {"x_token": "hdr55"} and max_new_tokens == 4
    return [float(len(completion)) for completion in completions]
"""
SECRETS = ("sk-1234", "pass99", "tok77", "hdr55", "other11")


@pytest.fixture
def judged(toy: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(JUDGE)
    options = {"api_key": "sk-1234", "url": "https://me:pass99@host/v1?token=tok77"}
    options |= {"max_new_tokens": 4, "headers": {"x_token": "hdr55"}}
    reward = {"reward": f"{tmp_path / 'judge.py'}:judge", "options": options}
    config = {**toy, "rewards": [reward], "threads": 1, "evaluation": {}, "max_steps": 1}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_no_file_and_no_line_of_a_run_holds_a_secret_and_it_goes_on_from_the_users_own_file(
    judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    run, key = tmp_path / "run", "rewards.0.options.api_key"
    command = ["train", str(judged), f"output_dir={run}", f"{key}=sk-1234"]
    monkeypatch.setattr(sys, "argv", ["grpo-fast", *command])
    assert main(command) == 0
    assert main([*command, "max_steps=2", "--resume"]) == 0
    assert len(steps_of(run)) == 3
    assert main(["train", str(run), "max_steps=3", "--resume"]) == 1
    said = "".join(capfd.readouterr())
    assert f"{key} = '***' is hidden in a run's folder: give it again" in said
    for wrong in ("rewards.0.options.token={a: [other11}", "evaluation.token=other11"):
        assert main(["train", str(judged), wrong]) == 2
    assert main(["train", str(judged), "--print-config"]) == 0
    said += "".join(capfd.readouterr())
    written = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "provenance.jsonl"} <= {path.name for path in written}
    for secret in SECRETS:
        assert secret not in said, said
        assert not [path for path in written if secret.encode() in path.read_bytes()]
    saved = yaml.safe_load((run / "config.yaml").read_text())["rewards"][0]["options"]
    assert saved == {
        "api_key": "***",
        "url": "https://me:***@host/v1?token=***",
        "max_new_tokens": 4,
        "headers": {"x_token": "***"},
    }


def test_a_variable_of_the_environment_stands_for_a_secret_and_the_run_keeps_its_name(
    judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    config = yaml.safe_load(judged.read_text())
    options = config["rewards"][0]["options"]
    options |= {"api_key": "${JUDGE_KEY}", "url": "${JUDGE_URL}", "headers": {"x_token": "${JUDGE_TOKEN}"}}
    judged.write_text(yaml.safe_dump(config))
    run, key = tmp_path / "run", "rewards.0.options.api_key"
    assert main(["train", str(judged), f"output_dir={run}"]) == 1
    said = f"{key} = '${{JUDGE_KEY}}', and the environment has no JUDGE_KEY: export JUDGE_KEY"
    assert said in capfd.readouterr().err

    for name, value in {"KEY": SECRETS[0], "URL": f"https://me:pass99@host/v1?token={SECRETS[2]}"}.items():
        monkeypatch.setenv(f"JUDGE_{name}", value)
    monkeypatch.setenv("JUDGE_TOKEN", SECRETS[3])
    assert main(["train", str(judged), f"output_dir={run}"]) == 0
    assert main(["train", str(run), "max_steps=2", "--resume"]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["rewards"][0]["options"] == options
    assert not [path for path in run.rglob("*") if path.is_file() and b"sk-1234" in path.read_bytes()]


LOGGING = """
def logs(completions, trainer_state, log_metric, log_extra, **columns):
    assert columns.keys() >= {"prompts", "completion_ids"} and trainer_state.max_steps == 2
    log_metric("step", trainer_state.global_step)
    log_metric("characters", sum(map(len, completions)) / len(completions))
    log_extra("length", [len(completion) for completion in completions])
    return [float(len(completion)) for completion in completions]

def bad(completions, log_extra, **columns):
    log_extra("length", [1])
    return [0.0] * len(completions)
"""


@pytest.mark.parametrize("per_group", [False, True])
def test_rewards_are_told_the_step_and_what_they_log_is_kept(
    toy: dict[str, Any], tmp_path: Path, per_group: bool
):
    (tmp_path / "own.py").write_text(LOGGING)
    rewards = [{"reward": f"{tmp_path / 'own.py'}:logs", "per_group": per_group}]
    logging = {"tensorboard": False, "samples_every": 1}
    config = {**toy, "rewards": rewards, "threads": 1, "max_steps": 2, "logging": logging}
    run = train(TrainConfig(**config, output_dir=str(tmp_path / "run")), display=False).run_dir

    before, *steps = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert before["eval/logged/step"] == 0 and steps[-1]["eval/logged/step"] == 2
    assert [step["logged/step"] for step in steps] == [0, 1]
    for step in steps:
        assert step["logged/characters"] == pytest.approx(step["reward/logs/mean"])
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert samples and all(sample["extra"] == {"length": sample["rewards"]["logs"]} for sample in samples)

    rewards = [{"reward": f"{tmp_path / 'own.py'}:bad", "per_group": per_group}]
    with pytest.raises(RewardError, match=r"log_extra\('length'\) has 1 values for \d+ completions"):
        train(TrainConfig(**config | {"rewards": rewards}, output_dir=str(tmp_path / "bad")), display=False)
    with pytest.raises(ValueError, match=r"log_metric\('ratio'\) has nan: log a finite number"):
        Log(1).log_metric("ratio", math.nan)
