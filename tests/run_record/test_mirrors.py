from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_fast.run_record.config import LoggingConfig
from grpo_fast.run_record.files import read_jsonl
from grpo_fast.run_record.logs import RunLogs, SampleRecord

CONFIG = LoggingConfig(tensorboard=False, project="sums")


class Service:
    """Stands for wandb and trackio: remembers how it was started and what it was told."""

    def __init__(self) -> None:
        self.starts: list[dict] = []
        self.logged: list[tuple[dict, int | None]] = []
        self.finished = 0
        self.is_down = False

    def init(self, **kwargs: object) -> Service:
        self.starts.append(kwargs)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def Table(self, columns: list, data: list) -> dict:
        return {"columns": columns, "data": data}

    def log(self, metrics: dict, step: int | None = None) -> None:
        if self.is_down:
            raise ConnectionError("the network is down")
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.finished += 1


def test_tensorboard_shows_metrics_and_timings_and_hides_steps_that_were_run_again(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in (range(1, 6), range(3, 8)):  # killed after step 5, resumed from step 2
        logs = RunLogs(tmp_path, LoggingConfig())
        for step in steps:
            logs.metrics(step, {"loss": float(step)}, timings={"time/step": 0.5})
        logs.close()

    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    assert [event.step for event in events.Scalars("loss")] == list(range(1, 8))
    assert [event.step for event in events.Scalars("time/step")] == list(range(1, 8))


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch):
    """Logs steps in a run directory with a tracker, as one process of a run does; the tracker's double."""
    service = Service()

    def log_in(name: str, run_dir: Path, steps=range(1, 2), samples=(), **changes: object) -> Service:
        monkeypatch.setitem(sys.modules, name, service)
        logs = RunLogs(run_dir, CONFIG.model_copy(update={name: True, **changes}))
        for step in steps:
            logs.metrics(step, {"loss": 0.5})
        logs.samples(steps[-1], samples)
        logs.close()
        return service

    log_in.service = service
    return log_in


def test_wandb_continues_its_run_on_an_axis_that_may_go_back(tmp_path: Path, log_in) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("seed: 3\n")

    log_in("wandb", run_dir)
    service = log_in("wandb", run_dir)

    first, second = service.starts
    assert first["id"] == second["id"]
    told = {key: first[key] for key in ("project", "name", "resume", "config")}
    assert told == {"project": "sums", "name": "run", "resume": "allow", "config": {"seed": 3}}
    assert service.logged == [({"step": 1, "loss": 0.5}, None)] * 2
    assert service.finished == 2


def test_trackio_continues_its_run_and_another_directory_gets_another(tmp_path: Path, log_in) -> None:
    for run_dir in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        service = log_in("trackio", run_dir)

    first, again, other = (start["name"] for start in service.starts)
    assert first == again != other
    assert service.logged == [({"loss": 0.5}, 1)] * 3


RIGHT = SampleRecord(
    0, "2 + 2", "2 + 2 |", "<b>4</b>\nyes", {"exact": 1.0, "format": None}, 0.9, 0.5, False, 5
)
WRONG = SampleRecord(
    0, "2 + 2", "2 + 2 |", "broken \udc80", {"exact": 0.0, "format": 1.0}, 0.1, -0.5, True, 9
)
COLUMNS = ["group", "prompt", "completion", "exact", "format", "reward", "advantage", "tokens", "truncated"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_completions_as_a_table_that_any_text_fits(tmp_path: Path, log_in, name: str) -> None:
    service = log_in(name, tmp_path, samples=[RIGHT, WRONG])

    (tables, _) = service.logged[-1]
    assert tables["samples"]["columns"] == COLUMNS
    assert tables["samples"]["data"] == [
        [0, "2 + 2 |", "<b>4</b>\nyes", 1.0, None, 0.9, 0.5, 5, False],
        [0, "2 + 2 |", "broken \\udc80", 0.0, 1.0, 0.1, -0.5, 9, True],
    ]


def test_tensorboard_gets_completions_as_text_in_which_nothing_is_markup(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logs = RunLogs(tmp_path, LoggingConfig())
    logs.samples(6, [RIGHT, WRONG])
    logs.close()

    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    (event,) = events.Tensors("samples/text_summary")
    rows = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 6 and rows[0] == f"| {' | '.join(COLUMNS)} |"
    assert rows[2] == "| 0 | 2 + 2 &#124; | &lt;b&gt;4&lt;/b&gt;<br>yes | 1 | None | 0.9 | 0.5 | 5 | False |"
    assert all(row.count("|") == len(COLUMNS) + 1 for row in rows)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_that_does_not_start_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("nobody is logged in")

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=refuse))
    with pytest.raises(RuntimeError, match=rf"logging\.{name} = true.*nobody is logged in"):
        RunLogs(tmp_path, CONFIG.model_copy(update={name: True}))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ModuleNotFoundError, match=rf"logging\.{name}"):
        RunLogs(tmp_path, CONFIG.model_copy(update={name: True}))


def test_a_service_that_fails_costs_one_warning_and_no_metrics(tmp_path: Path, log_in, caplog) -> None:
    log_in.service.is_down = True

    log_in("trackio", tmp_path, range(1, 3))

    (warning,) = caplog.messages
    assert "Trackio failed" in warning and "the network is down" in warning and "metrics.jsonl" in warning
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_mirrors_may_get_fewer_steps_than_the_file(tmp_path: Path, log_in) -> None:
    service = log_in("trackio", tmp_path, range(1, 8), every=3)

    assert [step for _, step in service.logged] == [3, 6]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 7
