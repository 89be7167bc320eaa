from __future__ import annotations

import errno
import json
import multiprocessing
import random
import resource
import shutil
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.run_record import checkpoint as checkpoint_module
from grpo_fast.run_record.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
    DamagedCheckpoint,
    check_writable,
    verify,
)

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"weight": torch.full((100, 40), float(step)), "bias": torch.full((7,), step).bfloat16()},
        "optimizer": {"weight.exp_avg": torch.full((100, 40), -float(step))},
    }


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, tensors_of(step), {"position": step, "name": "käse"})


def assert_is(checkpoint, step: int) -> None:
    assert checkpoint.step == step
    assert checkpoint.state == {"position": step, "name": "käse"}
    for group, named in tensors_of(step).items():
        for name, tensor in named.items():
            torch.testing.assert_close(checkpoint.tensors[group][name], tensor, rtol=0, atol=0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_what_was_saved_is_loaded_and_only_the_newest_are_kept(store):
    assert store.load_latest() is None
    save(store, 1, 2, 3, 4, 5)

    assert_is(store.load_latest(), 5)
    assert_is(store.load(store.root / "step-00000004"), 4)
    assert_is(store.load("step-00000003"), 3)
    assert sorted(path.name for path in store.root.iterdir()) == [f"step-0000000{i}" for i in (3, 4, 5)]
    assert sorted(path.name for path in store.paths()[0].iterdir()) == sorted(FILES)
    assert sorted(verify(store.paths()[0])) == sorted(set(FILES) - {"manifest.json"})
    with pytest.raises(CheckpointError, match=r"step-00000009.*step-00000003"):
        store.load("step-00000009")


def test_saving_a_step_again_replaces_it_and_deletes_the_future_of_before_a_resume(store):
    save(store, 2, 4, 6)

    store.save(4, {"model": {"weight": torch.ones(3)}}, {"again": True})

    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000002", "step-00000004"]
    assert store.load_latest().state == {"again": True}


def test_tensors_of_any_dtype_tied_overlapping_strided_trainable_or_empty_are_saved_by_value(store):
    weight = torch.nn.Parameter(torch.randn(6, 8))
    views = {"a": weight, "tied": weight, "t": weight.t(), "row": weight[2], "every_other": weight[:, ::2]}
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.uint8)
    kinds = {str(dtype)[6:]: torch.randint(0, 2, (3, 5)).to(dtype) for dtype in dtypes}
    given = views | kinds | {"scalar": kinds["int32"][0, 0], "empty": kinds["int32"][:0]}

    store.save(1, {"model": given}, {})

    loaded = store.load_latest().tensors["model"]
    for name, tensor in given.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "grow"])
def test_damage_is_refused_by_name_and_the_one_before_is_offered(store, file, damage, dice):
    save(store, 1, 2, 3)
    path = store.root / "step-00000003" / file
    content = bytearray(path.read_bytes())
    if damage == "flip":
        # In the manifest, a byte that matters: a digit of a checksum.
        position = (
            content.rindex(b'"sha256": "') + 15 if file == "manifest.json" else dice.randrange(len(content))
        )
        content[position] ^= 1 << dice.randrange(7)
    elif damage == "truncate":
        del content[dice.randrange(len(content) - 1) :]
    elif damage == "grow":
        content += b"\1"
    path.write_bytes(content)
    if damage == "delete":
        path.unlink()

    with pytest.raises(DamagedCheckpoint) as caught:
        store.load_latest()

    message = str(caught.value)
    assert str(store.root / "step-00000003") in message
    assert f"--resume {store.root / 'step-00000002'}" in message
    if file != "manifest.json" or damage != "flip":
        assert file in message
    assert_is(store.load(store.root / "step-00000002"), 2)


@pytest.mark.parametrize(("damaged", "offered"), [((2, 3), "step-00000001"), ((1, 2, 3), None)])
def test_the_offer_skips_what_is_damaged_too(store, damaged, offered):
    save(store, 1, 2, 3)
    for step in damaged:
        (store.root / f"step-0000000{step}" / "state.json").unlink()

    with pytest.raises(DamagedCheckpoint) as caught:
        store.load_latest()
    assert str(caught.value).endswith(f"--resume {store.root / offered}" if offered else "start the run anew")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"files": {"../../secret": {}, "state.json": {}}}, "manifest.json"), ({"format": 2}, "format 2")],
    ids=["files elsewhere", "a newer format"],
)
def test_a_manifest_is_not_believed_everything(store, change, message):
    save(store, 1)
    manifest = store.root / "step-00000001" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))

    with pytest.raises(CheckpointError, match=message) as caught:
        store.load_latest()
    assert isinstance(caught.value, DamagedCheckpoint) == ("files" in change)


def keep_saving(root: Path, first: int, done) -> None:
    store = CheckpointStore(root, keep=2)
    for step in range(first, first + 10_000):
        save(store, step)
        done.value = step


def test_a_kill_at_any_moment_leaves_every_checkpoint_whole(tmp_path, dice):
    context = multiprocessing.get_context("fork")
    done = context.Value("q", 0, lock=False)  # which a kill might leave locked
    for _ in range(12):
        first = done.value + 1
        saver = context.Process(target=keep_saving, args=(tmp_path, first, done))
        saver.start()
        deadline = time.monotonic() + 60
        while done.value < first and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(dice.random() * 0.03)
        saver.kill()
        saver.join()

        store = CheckpointStore(tmp_path)
        assert store.load_latest().step >= done.value >= first
        assert len(store.paths()) >= min(2, done.value)
        for path in store.paths():
            assert_is(store.load(path), int(path.name[5:]))
        done.value = store.load_latest().step

    CheckpointStore(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in store.paths()}


@pytest.mark.parametrize("kept", [True, False])
def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(store, kept):
    save(store, 1)
    path = store.root / "step-00000001"
    shutil.copytree(path, path.with_suffix(".old"))
    if not kept:
        shutil.rmtree(path)

    CheckpointStore(store.root, keep=1)

    assert [p.name for p in store.root.iterdir()] == ["step-00000001"]
    assert_is(store.load_latest(), 1)


def test_opening_a_store_to_read_touches_nothing_and_cannot_save(store):
    save(store, 1)
    unfinished = store.root / "step-00000002.tmp"
    unfinished.mkdir()

    reader = CheckpointStore(store.root)

    assert_is(reader.load_latest(), 1)
    assert unfinished.is_dir()
    with pytest.raises(ValueError, match="opened to read"):
        reader.save(3, {}, {})


@pytest.mark.parametrize("moment", ["save_file", "fingerprint", "sync"])
@pytest.mark.parametrize(
    ("cause", "raised"),
    [(OSError(errno.ENOSPC, "disk full"), CheckpointSaveError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_full_disk_or_an_interruption_fails_one_save_only(store, monkeypatch, moment, cause, raised):
    save(store, 1, 2)

    def fail(*_: object) -> None:
        raise cause

    monkeypatch.setattr(checkpoint_module, moment, fail)
    with pytest.raises(raised):
        save(store, 3)
    monkeypatch.undo()

    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000001", "step-00000002"]
    assert_is(store.load_latest(), 2)
    save(store, 3)
    assert_is(store.load_latest(), 3)


def save_within(root: Path, limit: int, result) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        CheckpointStore(root, keep=2).save(2, tensors_of(2), {})
    except CheckpointSaveError:
        result.value = 1


def test_a_write_that_the_system_cuts_short_fails_one_save_only(store):
    save(store, 1)
    context = multiprocessing.get_context("fork")
    result = context.Value("i", 0)
    saver = context.Process(target=save_within, args=(store.root, 4096, result))

    saver.start()
    saver.join()

    assert (saver.exitcode, result.value) == (0, 1)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    assert_is(store.load_latest(), 1)


def test_a_place_that_cannot_be_written_is_reported_before_training_and_at_the_save(tmp_path):
    (tmp_path / "file").touch()
    below_a_file = tmp_path / "file" / "checkpoints"

    with pytest.raises(CheckpointError, match=f"cannot write to {below_a_file}"):
        check_writable(below_a_file, 0)
    with pytest.raises(CheckpointSaveError, match="cannot save"):
        save(CheckpointStore(below_a_file, keep=1), 1)


def test_too_little_space_is_reported_with_what_is_needed_and_free(tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 3 * 2**29))

    check_writable(tmp_path / "run", 3 * 2**29)
    with pytest.raises(CheckpointError, match=r"2\.0 GiB .* 1\.5 GiB"):
        check_writable(tmp_path / "run", 2**31)


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(()).item()]


def test_random_states_survive_a_checkpoint(store):
    random.gauss(0, 1), np.random.randn()  # each leaves a second normal number in its state
    tensors, state = capture_rng()
    store.save(1, {"rng": tensors}, {"rng": state})
    expected = [draw(), draw()]

    loaded = store.load_latest()
    restore_rng(loaded.tensors["rng"], loaded.state["rng"])

    assert [draw(), draw()] == expected


def test_cuda_states_are_not_dropped_without_cuda(monkeypatch):
    tensors, state = capture_rng()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ValueError, match="CUDA"):
        restore_rng({**tensors, "cuda": tensors["cpu"]}, state)


@pytest.mark.gpu
def test_the_cuda_state_survives():
    torch.rand(1, device="cuda")
    tensors, state = capture_rng()
    expected = torch.rand(5, device="cuda")

    restore_rng(tensors, state)

    assert torch.equal(torch.rand(5, device="cuda"), expected)
