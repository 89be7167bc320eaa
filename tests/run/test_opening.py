"""The first lines of a run: what is trained, on what and where."""

from __future__ import annotations

from grpo_fast.config.schema import TrainConfig
from grpo_fast.run import build_trainer
from grpo_fast.run.opening import opening_lines


def lines_of(config: TrainConfig) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in opening_lines(config, build_trainer(config)))


def test_a_run_begins_with_its_model_data_groups_and_place(toy):
    held_out = {"dataset": {**toy["dataset"], "size": 4}, "every": 2, "threshold": 0.5}
    changes = {"checkpoint": {"every": 5}, "loss": {"sampler_correction": "token_truncate"}, "threads": 1}
    changes |= {
        "model": toy["model"] | {"lora": {"r": 2}},
        "stages": [{"name": "easy", "steps": 3}, {"name": "hard"}],
    }
    lines = lines_of(TrainConfig(**toy | changes | {"evaluation": held_out, "output_dir": "runs/mine"}))

    assert list(lines) == ["model", "data", "groups", "run"]
    assert "18,144 parameters, 1,856 trained; float32 on CPU, 1 thread" in lines["model"]
    assert "24 prompts of 32 rows (8 left out, in the held-out set); held out, " in lines["data"]
    assert "right: near_w7>=0.5, scored every 2 steps: " in lines["data"] and lines["data"].endswith(
        "prompts.jsonl: 4 prompts"
    )
    assert lines["groups"].startswith("4 prompts a step, 6 completions of each, at most 8 tokens")
    assert "by TransformersEngine, corrected by token_truncate; rewards: near_w7" in lines["groups"]
    said = "runs/mine: 6 steps in the stages easy, hard; a checkpoint every 5 steps and at the end"
    assert lines["run"] == said


def test_a_run_is_scored_every_tenth_where_that_is_cheap(toy):
    def schedule(questions: int, **changes) -> tuple[int, int | None]:
        settings = toy | {"max_steps": 95, "evaluation": toy["evaluation"] | changes.pop("evaluation", {})}
        return TrainConfig(**settings | changes).evaluation_schedule(questions)

    assert schedule(24) == (10, None)  # of 10 * 4 * 6 completions at most a tenth
    assert schedule(25) == (0, None)
    assert schedule(500, prompts_per_step=16) == (10, 96)
    assert schedule(24, evaluation={"num_samples": 2, "temperature": 1.0}) == (0, None)
    assert schedule(500, evaluation={"size": 20}) == (10, 20)
    assert schedule(24, evaluation={"every": 0}) == (0, None)
    assert schedule(500, evaluation={"every": 7, "size": 50}) == (7, 50)
    assert "scored every 10 steps, by default" in lines_of(TrainConfig(**toy | {"max_steps": 100}))["data"]
