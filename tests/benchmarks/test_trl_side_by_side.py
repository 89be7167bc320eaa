"""How two GRPO runs are compared, and what of the comparison is written down."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="pip install --no-deps 'trl~=1.16.0'")
if importlib.metadata.version("trl").split(".")[:2] != ["1", "16"] and not torch.cuda.is_available():
    pytest.skip("only TRL 1.16's own head runs on a CPU", allow_module_level=True)

from benchmarks import trl_side_by_side
from benchmarks.train_runs import Run, Setting, watch_sampling
from benchmarks.train_tasks import words_task
from benchmarks.trl_side_by_side import differences, first_flip


def run_of(*samples: list[int], steps: int = 4) -> Run:
    return Run([{"loss": 0.0}] * steps, [torch.tensor([sample]) for sample in samples], 1.0, None)


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


def test_the_first_step_on_another_token_is_the_first_of_its_generation():
    base = run_of([1, 2], [3, 4])

    assert first_flip(base, run_of([1, 2], [3, 4])) is None
    assert first_flip(base, run_of([1, 2], [3, 5])) == 2
    assert first_flip(base, run_of([0, 2], [3, 4])) == 0


def test_steps_after_another_token_are_not_compared():
    base = Run([{"loss": 0.0, "grad_norm": 1.0}] * 4, run_of([1], [2]).samples, 1.0, None)
    run = Run(
        [*base.history[:2], *[{"loss": 9.0, "grad_norm": 1.0}] * 2], run_of([1], [3]).samples, 1.0, None
    )

    found = trl_side_by_side.compared(base, run)

    assert (found["steps_compared"], found["first_step_with_another_token"]) == (2, 2)
    assert found["differences"]["loss"] == 0


def test_given_samples_take_the_place_of_sampling():
    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def generate(self) -> torch.Tensor:
            torch.rand(5)
            return torch.tensor([[7]])

    model, replaying = Model(), Model()

    seen = watch_sampling(model, None)
    model.generate()
    next_draws = torch.rand(3)
    replayed = watch_sampling(replaying, [torch.tensor([[5]])])

    assert seen == [torch.tensor([[7]])]
    assert replaying.generate().tolist() == [[5]] and len(replayed) == 1
    assert torch.equal(torch.rand(3), next_draws)  # what is shuffled after sampling is shuffled alike


def test_a_record_is_completed_and_finished_cells_are_not_run_again(tmp_path, monkeypatch):
    path, measured = tmp_path / "record.json", []

    def measure(setting: Setting, *_: object) -> dict[str, object]:
        measured.append(setting.name)
        return {"name": setting.name, "steps": 2, "same_samples": False}

    monkeypatch.setattr(trl_side_by_side, "measure", measure)
    monkeypatch.setattr(trl_side_by_side, "environment", lambda _: {})
    task, both = words_task(tmp_path), [Setting("grpo"), Setting("dapo")]

    first = list(trl_side_by_side.run_cells(both[:1], task, "m", 2, False, path))
    second = list(trl_side_by_side.run_cells(both, task, "m", 2, False, path))

    assert measured == ["grpo, full, float32", "dapo, full, float32"]
    assert second[:1] == first and json.loads(path.read_text())["cells"] == second
    with pytest.raises(ValueError, match="holds cells of --model m, not n"):
        list(trl_side_by_side.run_cells(both, task, "n", 2, False, path))


def test_the_command_prints_a_row_for_each_trainer(tmp_path: Path, capsys):
    record = tmp_path / "record.json"

    options = "--steps 2 --loss grpo --tuning full --precision bfloat16 --json"
    trl_side_by_side.main([*options.split(), str(record)])

    rows = capsys.readouterr().out.splitlines()[2:]
    variants = ["TRL", "patched", "FastGRPOTrainer", "TRL in float32"]
    assert [row.split("|")[2].strip() for row in rows] == variants
    (cell,) = json.loads(record.read_text())["cells"]
    assert list(cell["variants"]) == variants
    assert cell["variants"]["patched"]["differences"]["loss"] < 0.05
