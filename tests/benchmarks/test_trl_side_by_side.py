"""How two GRPO runs are compared, and what of the comparison is written down."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="pip install --no-deps 'trl~=1.16.0'")
if importlib.metadata.version("trl").split(".")[:2] != ["1", "16"] and not torch.cuda.is_available():
    pytest.skip("only TRL 1.16's own head runs on a CPU", allow_module_level=True)

from benchmarks import trl_side_by_side
from benchmarks.trainers import words_task
from benchmarks.trl_side_by_side import History, TrainingSetup, compared, differences, watch_sampling


def run_of(losses: list[float], *samples: list[int]) -> History:
    history = [{"loss": loss, "grad_norm": 1.0} for loss in losses]
    return History(history, [torch.tensor([sample]) for sample in samples], 1.0)


def test_a_difference_is_the_largest_over_the_steps_and_relative_above_one():
    a = [{"loss": 0.1, "kl": 20.0, "step_time": 1.0}, {"loss": 0.3, "kl": 0.5, "step_time": 2.0}]
    b = [{"loss": 0.1, "kl": 21.0, "step_time": 9.0}, {"loss": 0.1, "kl": 0.5, "step_time": 9.0}]

    assert differences(a, b) == pytest.approx({"loss": 0.2, "kl": 0.05})


@pytest.mark.parametrize(("other", "gap"), [(math.nan, 0.0), (None, 0.0), (1.0, math.inf)])
def test_a_number_that_one_trainer_has_and_the_other_not_is_infinitely_far(other, gap):
    assert differences([{"loss": math.nan}], [{"loss": other}]) == {"loss": gap}


def test_a_name_that_one_trainer_logs_alone_is_refused():
    with pytest.raises(ValueError, match=r"\['kl'\] is logged by one trainer only"):
        differences([{"loss": 1.0}], [{"loss": 1.0, "kl": 0.0}])


@pytest.mark.parametrize(
    ("samples", "flip"), [([[1, 2], [3, 4]], None), ([[1, 2], [3, 5]], 2), ([[0, 2], [3, 4]], 0)]
)
def test_steps_from_the_first_generation_with_another_token_on_are_not_compared(samples, flip):
    base = run_of([0, 0, 0, 0], [1, 2], [3, 4])

    found = compared(base, run_of([0, 0.5, 9, 9] if flip else [0, 0.5, 0, 0], *samples))

    assert found["first_step_with_another_token"] == flip
    assert found["steps_compared"] == (4 if flip is None else flip)
    assert found["differences"] == ({} if flip == 0 else {"loss": 0.5, "grad_norm": 0})


def test_given_samples_take_the_place_of_sampling():
    def generate() -> torch.Tensor:
        torch.rand(5)
        return torch.tensor([[7]])

    model, replaying = (SimpleNamespace(device="cpu", generate=generate) for _ in range(2))

    seen = watch_sampling(model, None)
    model.generate()
    next_draws = torch.rand(3)
    replayed = watch_sampling(replaying, [torch.tensor([[5]])])

    assert seen == [torch.tensor([[7]])]
    assert replaying.generate().tolist() == [[5]] and len(replayed) == 1
    assert torch.equal(torch.rand(3), next_draws)  # what is shuffled after sampling is shuffled alike


def test_the_command_compares_each_trainer_and_completes_its_record(tmp_path: Path, capsys, monkeypatch):
    record = tmp_path / "record.json"
    options = ["--steps", "2", "--loss", "grpo", "--tuning", "full", "--json", str(record)]

    trl_side_by_side.main([*options, "--precision", "bfloat16"])

    printed = capsys.readouterr().out
    (cell,) = json.loads(record.read_text())["cells"]
    assert list(cell["variants"]) == ["TRL", "patched", "FastGRPOTrainer", "TRL in float32"]
    assert all(f"grpo, full, bfloat16, {name}: " in printed for name in cell["variants"])
    assert cell["variants"]["patched"]["differences"]["loss"] < 0.05

    def side_by_side(setup: TrainingSetup, *_: object) -> dict[str, dict]:
        assert setup.name == "grpo, full, float32"
        run = run_of([0.0], [1])
        return {"TRL": compared(run, run)}

    monkeypatch.setattr(trl_side_by_side, "side_by_side", side_by_side)
    trl_side_by_side.main([*options, "--precision", "bfloat16", "float32"])
    found = [cell["precision"] for cell in json.loads(record.read_text())["cells"]]
    assert found == ["bfloat16", "float32"]
    with pytest.raises(ValueError, match="holds cells of --model random, not m"):
        list(trl_side_by_side.run_cells([], words_task(tmp_path), "m", 2, record))
