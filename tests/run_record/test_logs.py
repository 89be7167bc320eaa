from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from grpo_fast.run_record.files import read_jsonl
from grpo_fast.run_record.logs import EvaluationLog, MetricsLog, SampleLog, SampleRecord
from grpo_fast.run_record.mirrors import LoggingConfig

QUIET = LoggingConfig(tensorboard=False)


def open_log(run_dir: Path) -> MetricsLog:
    return MetricsLog(run_dir, QUIET, run_name="run")


def test_a_step_is_one_line_and_its_timings_are_another_file(tmp_path: Path) -> None:
    log = open_log(tmp_path / "new" / "run")

    log.log(1, {"loss": 0.1 + 0.2, "kl": torch.tensor(0.5), "count": 3}, timings={"time/step": 6.5})
    log.log(2, {"loss": float("nan")})  # in the file before the log is closed

    run_dir = tmp_path / "new" / "run"
    assert (run_dir / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 0.30000000000000004, "kl": 0.5, "count": 3.0}\n{"step": 2, "loss": null}\n'
    )
    assert read_jsonl(run_dir / "timings.jsonl") == [{"step": 1, "time/step": 6.5}]


def test_a_run_taken_up_at_a_checkpoint_writes_the_same_bytes_as_one_that_was_never_stopped(
    tmp_path: Path, dice: random.Random
) -> None:
    values = [dice.gauss(0, 1) for _ in range(20)]
    stop, checkpoint = 15, dice.randint(0, 15)

    def write(log: MetricsLog, first: int, last: int) -> int:
        offset = 0
        for step in range(first, last + 1):
            log.log(step, {"loss": values[step - 1]}, timings={"time/step": dice.random()})
            if step == checkpoint:
                offset = log.offset
        log.close()
        return offset

    write(open_log(tmp_path / "whole"), 1, 20)
    offset = write(open_log(tmp_path / "resumed"), 1, stop)
    with open(tmp_path / "resumed" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 16, "lo')
    resumed = open_log(tmp_path / "resumed")
    resumed.truncate(offset)
    write(resumed, checkpoint + 1, 20)

    metrics = (tmp_path / "resumed" / "metrics.jsonl").read_bytes()
    assert metrics == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    timed = [record["step"] for record in read_jsonl(tmp_path / "resumed" / "timings.jsonl")]
    assert timed == list(range(1, 21))


def test_each_start_leaves_its_provenance(tmp_path: Path) -> None:
    for _ in range(2):
        open_log(tmp_path).close()

    starts = read_jsonl(tmp_path / "provenance.jsonl")
    assert len(starts) == 2
    assert starts[0]["versions"]["torch"] == torch.__version__
    assert starts[0].keys() == {"started", "command", "python", "system", "device", "versions"}


@pytest.mark.parametrize(
    ("metrics", "timings", "error", "name"),
    [
        ({"loss": "high"}, {}, TypeError, "loss"),
        ({"loss": None}, {}, TypeError, "loss"),
        ({"step": 1.0}, {}, ValueError, "step"),
        ({"loss": 1.0}, {"loss": 2.0}, ValueError, "loss"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(tmp_path: Path, metrics, timings, error, name: str) -> None:
    log = open_log(tmp_path)

    with pytest.raises(error, match=name):
        log.log(1, metrics, timings=timings)

    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    log.close()


def test_samples_keep_their_text_and_rewards_and_go_back_to_an_offset(tmp_path: Path) -> None:
    sample = SampleRecord("2 + 2 =", "<b>4</b>\n", {"exact": 1.0, "format": None}, 0.9, 0.7, False, 5)
    log = SampleLog(tmp_path)
    log.write(1, [sample, sample])
    offset = log.offset
    log.write(5, [sample])

    log.truncate(offset)
    log.close()

    records = read_jsonl(tmp_path / "samples.jsonl")
    assert records == [{"step": 1, **vars(sample)}] * 2


def test_evaluations_keep_their_interval_and_count(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)

    log.write(0, "held-out", 0.25, (0.125, 0.5), 300)
    log.close()

    assert read_jsonl(tmp_path / "evaluations.jsonl") == [
        {"step": 0, "name": "held-out", "score": 0.25, "interval": [0.125, 0.5], "n": 300}
    ]
