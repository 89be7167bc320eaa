"""The head benchmark on a CPU, in miniature."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import cell, head, peers
from benchmarks.__main__ import main
from benchmarks.losses import LOSSES, loss_of
from benchmarks.peers import Peer
from benchmarks.peers.torch_full import logprobs
from benchmarks.problem import Outcome, Problem, Run

TINY = [
    "--loss",
    "logprob",
    "--device",
    "cpu",
    "--hidden",
    "32",
    "--vocab",
    "300",
    "--tokens",
    "48",
    "--repeats",
    "3",
]


def run_head(folder: Path, *arguments: str, minutes: str = "30") -> tuple[int, dict]:
    out = folder / "record.json"
    code = main(["head", *TINY, "--minutes", minutes, "--json", str(out), *arguments])
    return code, json.loads(out.read_text())


def one_cell(*more: str) -> list[str]:
    return ["--rows", "peaked", "--mode", "forward_backward", "--trainable", *more]


def by_name(record: dict) -> dict[str, dict]:
    return {result["name"]: result for result in record["cells"][0]["results"]}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the implementations."""

    def replace(*found: Peer) -> None:
        monkeypatch.setattr(head, "all_peers", lambda: list(found))

    return replace


def test_a_run_prints_a_table_and_writes_a_record_of_every_cell(tmp_path, capsys):
    code, record = run_head(tmp_path, "--rows", "flat", "peaked", "--impl", "ours", "torch full logits")

    assert code == 0
    assert len(record["cells"]) == 6  # two kinds of rows: forward, and backward with either head
    states = {result["name"]: result["state"] for cell in record["cells"] for result in cell["results"]}
    assert states.pop("ours, tolerance 0, kept") == "skipped"  # needs a GPU
    assert set(states.values()) == {"ok"}
    ours = by_name(record)["ours"]
    assert ours["time"]["samples"] == 3
    assert ours["time"]["lower"] <= ours["time"]["median"] <= ours["time"]["upper"]
    assert ours["accuracy"]["logprob"] < 1e-4
    assert ours["accuracy"]["weight_gradient"] < 1e-4
    assert ours["certificate"]["density"] == 1.0
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["environment"]["command"]
    printed = capsys.readouterr().out
    assert "ours, tolerance 0" in printed
    assert "one product X Wᵀ" in printed


def test_without_a_loss_asked_for_all_are_measured(tmp_path, capsys):
    out = tmp_path / "record.json"
    shape = ["--device", "cpu", "--hidden", "16", "--vocab", "50", "60", "--tokens", "16", "--repeats", "3"]

    code = main(["head", *shape, "--frozen", *one_cell()[:-1], "--impl", "torch full", "--json", str(out)])

    settings = [cell["setting"] for cell in json.loads(out.read_text())["cells"]]
    assert code == 0
    assert [setting["loss"] for setting in settings] == [*LOSSES, "logprob"]
    assert [setting["vocabulary"] for setting in settings] == [50, 50, 50, 50, 60]
    assert "DPO, forward + backward, frozen head" in capsys.readouterr().out


def test_an_odd_batch_for_dpo_says_why_it_cannot_be_measured(tmp_path):
    _, record = run_head(tmp_path, *one_cell("--tokens", "15", "--loss", "dpo", "--impl", "torch full"))

    result = by_name(record)["torch full logits"]
    assert result["state"] == "error"
    assert "15 tokens are odd" in result["reason"]


def test_a_frozen_head_has_no_weight_gradient_to_judge(tmp_path):
    _, record = run_head(
        tmp_path, "--rows", "flat", "--mode", "forward_backward", "--frozen", "--impl", "ours"
    )

    accuracy = by_name(record)["ours"]["accuracy"]
    assert accuracy["hidden_gradient"] is not None
    assert accuracy["weight_gradient"] is None


def test_a_peer_that_raises_becomes_a_cell_and_the_others_are_measured(tmp_path, only, capsys):
    def broken(problem: Problem) -> Run:
        raise RuntimeError("kernel exploded")

    def full(problem: Problem) -> Run:
        raise torch.OutOfMemoryError("tried to allocate a vocabulary")

    only(Peer("broken", broken), Peer("greedy", full), *peers.choose(peers.all_peers(), ["torch full"]))
    code, record = run_head(tmp_path, *one_cell())

    found = by_name(record)
    assert code == 0
    assert found["broken"]["state"] == "error"
    assert "kernel exploded" in found["broken"]["reason"]
    assert found["greedy"]["state"] == "out of memory"
    assert found["torch full logits"]["state"] == "ok"
    assert "kernel exploded" in capsys.readouterr().out


def test_a_peer_that_fails_while_timed_becomes_a_cell(tmp_path, only):
    calls = []

    def tired(problem: Problem) -> Run:
        def run():
            calls.append(1)
            if len(calls) > 12:
                raise RuntimeError("worn out")
            return problem.finish(logprobs(problem.hidden, problem.weight, problem.targets))

        return run

    only(Peer("tired", tired))
    _, record = run_head(tmp_path, *one_cell("--repeats", "20"))

    assert by_name(record)["tired"]["state"] == "error"


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason(tmp_path, only, capsys):
    def absent(problem: Problem) -> Run:
        import a_library_that_nobody_has  # noqa: F401

        raise AssertionError

    only(Peer("absent", absent))
    code, record = run_head(tmp_path, *one_cell())

    assert code == 0
    assert by_name(record)["absent"]["state"] == "skipped"
    assert "skipped absent: not installed" in capsys.readouterr().out


def test_a_peer_that_needs_a_gpu_is_skipped_without_one(tmp_path, capsys):
    _, record = run_head(tmp_path, *one_cell("--impl", "torch.compile"))

    assert by_name(record)["torch.compile"]["state"] == "skipped"
    assert "needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [lambda found: 1.3 * found, lambda found: torch.nan * found])
def test_a_peer_with_wrong_log_probabilities_shows_as_inaccurate(tmp_path, only, capsys, damage):
    def wrong(problem: Problem) -> Run:
        return lambda: problem.finish(damage(logprobs(problem.hidden, problem.weight, problem.targets)))

    only(Peer("wrong", wrong))
    run_head(tmp_path, *one_cell())

    assert "INACCURATE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "damage"),
    [
        ("forward", lambda loss: loss + 1),
        ("forward_backward", lambda loss: loss.detach() + 1.5 * (loss - loss.detach())),
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_wrong_loss_or_gradient_without_log_probabilities_is_inaccurate(
    tmp_path, only, capsys, mode, damage, loss
):
    def wrong(problem: Problem) -> Run:
        def run() -> Outcome:
            found = logprobs(problem.hidden, problem.weight, problem.targets)
            return problem.finish_loss(damage(loss_of(problem, found)))

        return run

    only(Peer("wrong", wrong))
    run_head(tmp_path, "--rows", "flat", "--mode", mode, "--trainable", "--loss", loss)

    assert "INACCURATE" in capsys.readouterr().out


def test_a_peer_with_missing_results_is_an_error_not_a_winner(tmp_path, only):
    def short(problem: Problem) -> Run:
        def run() -> Outcome:
            found = problem.finish(logprobs(problem.hidden, problem.weight, problem.targets))
            return Outcome(found.logprobs[:-1])

        return run

    only(Peer("short", short), Peer("lazy", lambda problem: Outcome))
    _, record = run_head(tmp_path, *one_cell())

    found = by_name(record)
    assert (found["short"]["state"], found["lazy"]["state"]) == ("error", "error")
    assert "log-probabilities of shape" in found["short"]["reason"]
    assert "hidden.grad" in found["lazy"]["reason"]


def test_no_budget_ends_cleanly_with_a_record(tmp_path, capsys):
    code, record = run_head(tmp_path, "--rows", "flat", minutes="0")

    assert code == 0
    assert record["cells"] == []
    assert len(record["not_measured"]) == 3
    assert "the time budget is spent" in capsys.readouterr().out


def test_ctrl_c_saves_what_was_measured(tmp_path, only):
    def interrupted(problem: Problem) -> Run:
        raise KeyboardInterrupt

    first = peers.choose(peers.all_peers(), ["torch full"])
    only(*first, Peer("interrupted", interrupted))
    code, record = run_head(tmp_path, "--rows", "flat")

    assert code == 130
    assert record["stopped"] == "interrupted"
    assert by_name(record)["torch full logits"]["accuracy"]["logprob"] < 1e-4
    assert len(record["not_measured"]) == 2


def test_a_peer_that_breaks_the_device_ends_the_run_and_keeps_the_rest(tmp_path, only, monkeypatch, capsys):
    broken = []

    def breaking(problem: Problem) -> Run:
        broken.append(1)
        raise RuntimeError("illegal memory access")

    def synchronize(device: torch.device) -> None:
        if broken:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(cell, "synchronize", synchronize)
    first = peers.choose(peers.all_peers(), ["torch full"])
    only(*first, Peer("breaking", breaking))
    code, record = run_head(tmp_path, "--rows", "flat")

    assert code == 1
    assert by_name(record)["breaking"]["state"] == "error"
    assert by_name(record)["torch full logits"]["accuracy"]["logprob"] < 1e-4
    assert "breaking broke the device: RuntimeError: illegal memory access" in record["stopped"]
    assert "2 cells not measured" in " ".join(capsys.readouterr().out.split())


def test_real_rows_come_from_the_file_in_its_own_shape(tmp_path, capsys):
    torch.manual_seed(seed := torch.seed() % 2**31)
    print(f"seed {seed}")
    rows = {"hidden": torch.randn(20, 24), "target": torch.arange(20), "weight": torch.randn(90, 24)}
    save_file(rows, tmp_path / "rows.safetensors")

    _, record = run_head(
        tmp_path, "--rows", "real", "--real-rows", str(tmp_path / "rows.safetensors"), "--impl", "ours"
    )

    assert {(c["setting"]["hidden"], c["setting"]["vocabulary"]) for c in record["cells"]} == {(24, 90)}
    assert "20 rows of rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rows", "real"], "--real-rows"),
        (["--rows", "histogram"], "--histogram"),
        (["--impl", "nobody"], "nobody"),
        (["--minutes", "-1"], "--minutes"),
        (["--json", "no/such/folder/out.json"], "folder"),
        (["--real-rows", "absent.safetensors"], "absent.safetensors"),
    ],
)
def test_what_cannot_be_used_is_named(arguments, named, capsys):
    assert main(["head", *TINY, *arguments]) == 2
    assert named in capsys.readouterr().err


def test_an_installed_package_adds_its_implementation(monkeypatch):
    def of_group(group: str) -> list[EntryPoint]:
        assert group == "grpo_fast.benchmark_peers"
        return [
            EntryPoint("good", "benchmarks.peers.torch_full:PEERS", group),
            EntryPoint("broken", "a_module_that_is_not_there:PEERS", group),
        ]

    monkeypatch.setattr(peers, "entry_points", of_group)
    found = peers.all_peers()

    assert [peer.name for peer in found[-3:]] == ["torch full logits", "torch.compile", "broken"]
    with pytest.raises(ModuleNotFoundError):
        found[-1].prepare(None)
