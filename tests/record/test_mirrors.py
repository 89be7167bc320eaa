"""What TensorBoard, W&B and trackio get of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_fast.config.record import LoggingConfig
from grpo_fast.record.files import read_jsonl
from grpo_fast.record.logs import RunLogs, SampleRecord
from grpo_fast.record.mirrors import require_mirrors

SERVICES = pytest.mark.parametrize("name", ["wandb", "trackio"])
ASKED = (0, "2 + 2", "2 + 2 |")
RIGHT = SampleRecord(*ASKED, "<b>4</b>\nyes", {"exact": 1.0, "format": None}, 0.9, 0.5, False, 5)
WRONG = SampleRecord(*ASKED, "broken \udc80", {"exact": 0.0, "format": 1.0}, 0.1, -0.5, True, 9)
COLUMNS = ["group", "prompt", "completion", "exact", "format", "reward", "advantage", "tokens", "truncated"]


def logging_to(name: str, **changes: Any) -> LoggingConfig:
    return LoggingConfig.model_validate({"tensorboard": False, "project": "sums", name: True, **changes})


def log(
    run_dir: Path,
    config: LoggingConfig,
    steps: Sequence[int] = (1,),
    samples: Sequence[SampleRecord] = (),
    **timings: float,
) -> None:
    """What one process of a run does."""
    logs = RunLogs(run_dir, config)
    for step in steps:
        logs.metrics(step, {"loss": 0.5}, timings)
    logs.samples(steps[-1], samples)
    logs.close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for wandb and trackio."""
    double = Mock()
    double.Table = lambda columns, data: (columns, data)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, double)
    return double


def logged(service: Mock) -> list[tuple[Any, Any]]:
    """Return what was logged, each with its step."""
    calls = service.init.return_value.log.call_args_list
    return [(call.args[0], call.kwargs.get("step")) for call in calls]


def test_tensorboard_shows_each_step_once_and_completions_as_text(tmp_path: Path):
    log(tmp_path, LoggingConfig(), range(1, 6), **{"time/step": 0.5})
    log(tmp_path, LoggingConfig(), range(3, 8), [RIGHT, WRONG], **{"time/step": 0.5})  # resumed from step 2

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    for name in ("loss", "time/step"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, 8))
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7 and all(line[:4].isspace() for line in text.splitlines() if line)
    right, wrong = yaml.safe_load(text)
    assert [*right] == COLUMNS and right["completion"] == RIGHT.completion and right["format"] is None
    assert wrong["completion"] == "broken \\udc80"


def test_wandb_continues_its_run_on_an_axis_that_may_go_back(tmp_path: Path, service: Mock):
    (tmp_path / "config.yaml").write_text("seed: 3\n")

    for _ in range(2):
        log(tmp_path, logging_to("wandb"))

    first, second = (call.kwargs for call in service.init.call_args_list)
    assert first == second and first["id"]
    told = {key: first[key] for key in ("project", "name", "resume", "config")}
    assert told == {"project": "sums", "name": tmp_path.name, "resume": "allow", "config": {"seed": 3}}
    service.init.return_value.define_metric.assert_called_with("*", step_metric="step")
    assert logged(service) == [({"step": 1, "loss": 0.5}, None)] * 2
    assert service.init.return_value.finish.call_count == 2


def test_trackio_continues_its_run_and_another_directory_gets_another(tmp_path: Path, service: Mock):
    for name in ("a", "a", "b"):
        log(tmp_path / name, logging_to("trackio"))

    first, again, other = (call.kwargs["name"] for call in service.init.call_args_list)
    assert first == again != other
    assert logged(service) == [({"loss": 0.5}, 1)] * 3


@SERVICES
def test_a_service_gets_completions_as_a_table(tmp_path: Path, service: Mock, name: str):
    log(tmp_path, logging_to(name), samples=[RIGHT, WRONG])

    (told, _) = logged(service)[-1]
    right = [0, "2 + 2 |", "<b>4</b>\nyes", 1.0, None, 0.9, 0.5, 5, False]
    wrong = [0, "2 + 2 |", "broken \\udc80", 0.0, 1.0, 0.1, -0.5, 9, True]
    assert told["samples"] == (COLUMNS, [right, wrong])


@SERVICES
def test_a_service_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"logging\.{name} = true needs `pip install {name}`"):
        require_mirrors(logging_to(name))


def test_a_service_that_fails_costs_one_warning_and_no_metrics(tmp_path: Path, service: Mock, caplog):
    service.init.return_value.log.side_effect = ConnectionError("the network is down")

    log(tmp_path, logging_to("trackio", every=3), range(1, 8))

    (warning,) = caplog.messages
    assert "Trackio failed" in warning and "the network is down" in warning and "metrics.jsonl" in warning
    assert [step for _, step in logged(service)] == [3]  # and mirrors get fewer steps than the file
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 8))
