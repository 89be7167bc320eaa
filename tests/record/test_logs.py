"""The files of a run: their lines, and what a resumed run keeps of them."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_fast.config.record import LoggingConfig
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import RunLogs, SampleRecord

SAMPLE = SampleRecord(0, "2 + 2", "2 + 2 =", "<b>4</b>\n", {"exact": 1.0, "format": None}, 0.9, 0.7, False, 5)


def test_every_file_has_its_lines_before_the_logs_are_closed(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    logs = RunLogs(run_dir, LoggingConfig(tensorboard=False))

    logs.metrics(1, {"loss": 0.1 + 0.2, "kl": torch.tensor(0.5), "count": 3}, timings={"time/step": 6.5})
    logs.metrics(2, {"loss": float("nan")})
    logs.samples(1, [SAMPLE])
    logs.evaluation(0, "held-out", 0.25, (0.125, 0.5), 300)

    assert (run_dir / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 0.30000000000000004, "kl": 0.5, "count": 3.0}\n{"step": 2, "loss": null}\n'
    )
    assert read_jsonl(run_dir / "timings.jsonl") == [{"step": 1, "time/step": 6.5}]
    assert read_jsonl(run_dir / "samples.jsonl") == [{"step": 1, **vars(SAMPLE)}]
    assert read_jsonl(run_dir / "evaluations.jsonl") == [
        {"step": 0, "name": "held-out", "score": 0.25, "interval": [0.125, 0.5], "n": 300}
    ]
    (start,) = read_jsonl(run_dir / "provenance.jsonl")
    assert start["versions"]["torch"] == torch.__version__
