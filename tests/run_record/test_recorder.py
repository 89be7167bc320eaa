"""A run in which something fails: what is saved, what is said, and that it resumes as if nothing had been."""

from __future__ import annotations

import errno
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from grpo_fast.config import TrainConfig
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.finite import Diverged
from grpo_fast.run import train
from grpo_fast.run.export import export_run
from grpo_fast.run_record.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
)
from grpo_fast.trainer import Trainer
from grpo_fast.update import PolicyUpdate

SAMPLED = {"tensorboard": False, "samples_every": 1}


def in_process(toy: dict[str, Any], run_dir: Path, **changes: Any) -> TrainConfig:
    """Five steps, without checkpoints on the way."""
    return TrainConfig(**{**toy, "output_dir": str(run_dir), "logging": SAMPLED, "max_steps": 5, **changes})


def newest(config: TrainConfig) -> Checkpoint:
    found = CheckpointStore(Path(config.output_dir) / "checkpoints").load_latest()
    assert found is not None
    return found


def exact_files(run_dir: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")
    return {name: (run_dir / name).read_bytes() for name in names}


FORWARD = "grpo_fast.policy.policy.Policy.hidden_states"


def break_at_step(monkeypatch: pytest.MonkeyPatch, target: str, step: int, error: BaseException) -> None:
    """The first call of `target` once `step` steps are done raises."""
    original, train_step, steps = pkgutil.resolve_name(target), Trainer.train_step, []

    def counted(self: Trainer) -> Any:
        result = train_step(self)
        steps.append(self.step)
        return result

    def broken(*args: Any, **kwargs: Any) -> Any:
        if len(steps) == step:
            steps.append(-1)
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", counted)
    monkeypatch.setattr(target, broken)


@pytest.fixture(scope="module")
def whole_run(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps without a failure."""
    run_dir = tmp_path_factory.mktemp("driver") / "whole"
    train(in_process(toy, run_dir), display=False)
    return run_dir


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (FORWARD, KeyboardInterrupt()),
        ("grpo_fast.rollout.transformers.TransformersEngine.sync", ValueError("bug")),
    ],
)
def test_a_run_that_fails_before_an_update_saves_the_step_before_and_resumes_as_if_nothing_had_been(
    toy, contents, tmp_path: Path, whole_run: Path, monkeypatch, capsys, target: str, error: BaseException
):
    config = in_process(toy, tmp_path / "failed")
    with monkeypatch.context() as patch:
        break_at_step(patch, target, 3, error)
        with pytest.raises(type(error)):
            train(config)
    shown = capsys.readouterr().out
    assert f"{type(error).__name__}: step 3 is safe; continue with --resume" in shown
    assert newest(config).step == 3

    train(config, resume="latest", display=False)
    assert exact_files(tmp_path / "failed") == exact_files(whole_run)
    whole, resumed = contents(newest(in_process(toy, whole_run))), contents(newest(config))
    assert all(tensor.equal(resumed[name]) for name, tensor in whole.items())


def test_a_first_update_that_does_not_fit_keeps_the_step_before(toy, tmp_path: Path, monkeypatch, capsys):
    stages = [{"name": "one", "steps": 3}, {"name": "two", "fresh_optimizer": True}]
    config = in_process(toy, tmp_path / "run", stages=stages)
    train(config.model_copy(update={"output_dir": str(tmp_path / "whole")}), display=False)
    make_moments, steps = PolicyOptimizer._make_moments, []

    def full(self: PolicyOptimizer, names: Any) -> None:
        steps.append(1)
        if len(steps) == 4:  # the moments are made anew
            raise torch.OutOfMemoryError("no room")
        make_moments(self, names)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyOptimizer, "_make_moments", full)
        with pytest.raises(torch.OutOfMemoryError, match=r"model\.lora"):
            train(config)
    assert "step 3 is safe; continue with --resume" in " ".join(capsys.readouterr().out.split())

    train(config, resume="latest", display=False)
    assert exact_files(tmp_path / "run") == exact_files(tmp_path / "whole")


def test_a_failure_while_a_step_is_written_down_keeps_the_step(toy, tmp_path: Path, monkeypatch):
    config = in_process(toy, tmp_path / "run")
    with monkeypatch.context() as patch:
        break_at_step(patch, "grpo_fast.run_record.logs.RunLogs.samples", 3, ValueError("bug"))
        with pytest.raises(ValueError, match="bug"):
            train(config, display=False)
    assert newest(config).step == 3
    train(config, resume="latest", display=False)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4, 5]


def test_amid_several_updates_nothing_is_saved_and_the_message_names_the_last_checkpoint(
    toy, tmp_path: Path, monkeypatch, capsys
):
    config = in_process(toy, tmp_path / "run", num_iterations=2, checkpoint={"every": 2})
    backward, calls = PolicyUpdate.backward, []

    def broken(self: PolicyUpdate, *args: Any) -> Any:
        calls.append(True)
        if len(calls) == 8:  # the second update of the fourth step
            raise KeyboardInterrupt
        return backward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyUpdate, "backward", broken)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    shown = " ".join(capsys.readouterr().out.split())
    assert "amid the update of step 4" in shown and "the last is of step 2" in shown
    assert newest(config).step == 2
    train(config, resume="latest", display=False)


STEP = "grpo_fast.policy.optimizer.PolicyOptimizer.step"
NAN = Diverged("the gradient norm is nan")


@pytest.mark.parametrize(
    ("target", "error"), [(STEP, NAN), (FORWARD, FloatingPointError("the logits hold NaN"))]
)
def test_a_run_that_diverges_keeps_and_names_the_newest_checkpoint_before(
    toy, tmp_path: Path, monkeypatch, target: str, error: FloatingPointError
):
    run_dir = tmp_path / "run"
    config = in_process(toy, run_dir, checkpoint={"every": 1, "keep": 2})
    said = rf"after step 3: {error}; .*--resume {run_dir}\S*step-00000002, .*learning_rate \(0\.003 now"
    break_at_step(monkeypatch, target, 3, error)
    with pytest.raises(Diverged, match=said):
        train(config, display=False)

    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("every", [1, 3])
def test_weights_that_a_step_has_made_infinite_are_found_by_the_save_or_by_the_next_rollout(
    toy, tmp_path: Path, monkeypatch, every: int
):
    run_dir, step = tmp_path / "run", PolicyOptimizer.step

    def overflowing(self: PolicyOptimizer) -> float:
        norm = step(self)
        if self.state()["steps"] == 3:
            for parameter in self._parameters.values():
                parameter.data.fill_(float("inf"))
        return norm

    monkeypatch.setattr(PolicyOptimizer, "step", overflowing)
    config = in_process(toy, run_dir, checkpoint={"every": every})
    found = r"master\..* holds NaN" if every == 1 else "the model's logits hold NaN"
    with pytest.raises(Diverged, match=rf"after step 4: {found}.*--resume {run_dir}\S*step-00000003, "):
        train(config, display=False)


def test_a_model_whose_first_gradient_is_not_finite_is_to_blame_itself(toy, tmp_path: Path, monkeypatch):
    break_at_step(monkeypatch, STEP, 0, NAN)
    with pytest.raises(Diverged, match=r"after step 0: the gradient norm is nan; .*model\.dtype = float32"):
        train(in_process(toy, tmp_path / "run"), display=False)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_that_diverges_without_a_checkpoint_leaves_finite_weights_to_export_and_not_to_resume(
    toy, tmp_path: Path, monkeypatch
):
    config = in_process(toy, tmp_path / "run")
    weights = tmp_path / "run" / "checkpoints" / "step-00000003.weights"
    with monkeypatch.context() as patch:
        break_at_step(patch, STEP, 3, NAN)
        with pytest.raises(Diverged, match=f"no checkpoint from before.*`grpo-fast export {weights} OUT`"):
            train(config, display=False)

    export_run(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="weights alone"):
        train(config, resume=str(weights), display=False)


@pytest.mark.parametrize("room", ["for the weights", "for nothing"])
def test_the_last_step_s_weights_alone_are_saved_where_a_checkpoint_has_no_room(
    toy, tmp_path: Path, monkeypatch, room: str
):
    run_dir = tmp_path / "run"

    write, tried = FileSystem.create_stream, []

    def full(files: FileSystem, path: Path, mode: str) -> Any:
        if path.parent.name == "step-00000003.tmp" and not (tried and room == "for the weights"):
            tried.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(files, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    said = "grpo-fast export" if room == "for the weights" else "cannot save .*step-00000003"
    with pytest.raises(CheckpointSaveError, match=said):
        train(in_process(toy, run_dir, max_steps=3, checkpoint={"every": 2, "keep": 1}), display=False)

    found = CheckpointStore(run_dir / "checkpoints")
    assert found.load_intact().step == 2
    assert found.load_latest().step == (3 if room == "for the weights" else 2)
