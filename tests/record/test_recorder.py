"""A run in which something fails: what is saved, what is said, and that it resumes as if nothing had been."""

from __future__ import annotations

import errno
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from grpo_fast.config.schema import TrainConfig
from grpo_fast.loop.trainer import Trainer
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.optimizer import Diverged
from grpo_fast.record.checkpoint import (
    Checkpoint,
    CheckpointSaveError,
    CheckpointStore,
)
from grpo_fast.record.files import read_jsonl
from grpo_fast.run import train
from grpo_fast.run.export import export_run

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
SYNC = "grpo_fast.rollout.transformers.TransformersEngine.sync"
STEP = "grpo_fast.policy.optimizer.PolicyOptimizer.step"
MOMENTS = "grpo_fast.policy.optimizer.PolicyOptimizer._make_moments"
BACKWARD = "grpo_fast.loop.update.PolicyUpdate.gradient"
SAMPLES = "grpo_fast.record.logs.RunLogs.samples"
NAN = Diverged("the gradient norm is nan")


@pytest.fixture
def fail(capsys):
    def fail(config: TrainConfig, target: str, error: BaseException, *, step: int = 3, call: int = 1) -> str:
        """What a run prints and raises whose `call`th call of `target` after a step fails."""
        original, train_step, calls, steps = pkgutil.resolve_name(target), Trainer.train_step, [], []

        def counted(self: Trainer) -> Any:
            result = train_step(self)
            steps.append(self.step)
            return result

        def broken(*args: Any, **kwargs: Any) -> Any:
            calls.extend([1] if len(steps) == step else [])
            if len(calls) == call:
                calls.append(1)
                raise error
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(BaseException) as raised:
            patch.setattr(Trainer, "train_step", counted)
            patch.setattr(target, broken)
            train(config)
        assert raised.type is (Diverged if isinstance(error, FloatingPointError) else type(error))
        return f"{' '.join(capsys.readouterr().out.split())} {raised.value}"

    return fail


@pytest.fixture(scope="module")
def whole_run(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps without a failure."""
    run_dir = tmp_path_factory.mktemp("driver") / "whole"
    train(in_process(toy, run_dir), display=False)
    return run_dir


@pytest.mark.parametrize(("target", "error"), [(FORWARD, KeyboardInterrupt()), (SYNC, ValueError("bug"))])
def test_a_failure_before_an_update_is_resumed_as_if_it_had_not_been(
    toy, contents, tmp_path: Path, whole_run: Path, fail, target: str, error: BaseException
):
    config = in_process(toy, tmp_path / "failed")
    said = fail(config, target, error)
    assert f"{type(error).__name__}: step 3 is safe; continue with --resume" in said
    assert newest(config).step == 3

    train(config, resume="latest", display=False)
    assert exact_files(tmp_path / "failed") == exact_files(whole_run)
    whole, resumed = contents(newest(in_process(toy, whole_run))), contents(newest(config))
    assert all(tensor.equal(resumed[name]) for name, tensor in whole.items())


def test_a_first_update_that_does_not_fit_keeps_the_step_before(toy, tmp_path: Path, fail):
    stages = [{"name": "one", "steps": 3}, {"name": "two", "fresh_optimizer": True}]
    config, whole = (in_process(toy, tmp_path / name, stages=stages) for name in ("run", "whole"))
    said = fail(config, MOMENTS, torch.OutOfMemoryError("no room"))  # the moments are made anew
    assert "step 3 is safe; continue with --resume" in said and "model.lora" in said

    train(config, resume="latest", display=False)
    train(whole, display=False)
    assert exact_files(tmp_path / "run") == exact_files(tmp_path / "whole")


def test_a_failure_while_a_step_is_written_down_keeps_the_step(toy, tmp_path: Path, fail):
    config = in_process(toy, tmp_path / "run")
    fail(config, SAMPLES, ValueError("bug"))
    assert newest(config).step == 3
    train(config, resume="latest", display=False)
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [*range(6)]


def test_amid_several_updates_nothing_is_saved(toy, tmp_path: Path, fail):
    config = in_process(toy, tmp_path / "run", num_iterations=2, checkpoint={"every": 2})
    said = fail(config, BACKWARD, KeyboardInterrupt(), call=2)
    assert "amid the update of step 4" in said and "the last is of step 2" in said
    assert newest(config).step == 2
    train(config, resume="latest", display=False)


@pytest.mark.parametrize(
    ("target", "error"), [(STEP, NAN), (FORWARD, FloatingPointError("the logits hold NaN"))]
)
def test_a_run_that_diverges_keeps_and_names_the_newest_checkpoint_before(toy, tmp_path, fail, target, error):
    run_dir = tmp_path / "run"
    said = fail(in_process(toy, run_dir, checkpoint={"every": 1, "keep": 2}), target, error)
    named = rf"after step 3: {error}; .*--resume {run_dir}\S*step-00000002, .*learning_rate \(0\.003 now"
    assert re.search(named, said)
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("every", [1, 3])
def test_infinite_weights_are_found_by_the_save_or_the_next_rollout(toy, tmp_path, monkeypatch, every):
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


def test_a_model_whose_first_gradient_is_not_finite_is_to_blame_itself(toy, tmp_path: Path, fail):
    said = fail(in_process(toy, tmp_path / "run"), STEP, NAN, step=0)
    assert re.search(r"after step 0: the gradient norm is nan; .*model\.dtype = float32", said)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_that_diverges_without_a_checkpoint_can_be_exported(toy, tmp_path: Path, fail):
    config = in_process(toy, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step-00000003"
    said = fail(config, STEP, NAN)
    assert "no checkpoint from before" in said and f"`grpo-fast export {saved} OUT`" in said

    export_run(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_full_disk_costs_a_message_on_the_way_and_ends_the_last_save(toy, tmp_path, monkeypatch, capsys):
    write = FileSystem.create_stream

    def full(files: FileSystem, path: Path, mode: str) -> Any:
        if path.parent.name in ("step-00000001.tmp", "step-00000003.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(files, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    config = in_process(toy, tmp_path / "run", max_steps=3, checkpoint={"every": 1}, evaluation={})
    with pytest.raises(CheckpointSaveError, match=r"cannot save .*step-00000003.*newest .*step-00000002"):
        train(config)

    assert "checkpoint of step 1 not saved" in capsys.readouterr().out and newest(config).step == 2
