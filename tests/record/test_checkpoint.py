"""Checkpoints: what is saved and loaded, what a kill or a full disk leaves, and what damage is found."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import resource
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo_fast.policy.optimizer import Diverged
from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.record import checkpoint as checkpoint_module
from grpo_fast.record.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointStore,
    DamagedCheckpoint,
    verify,
)

SHARDS = [f"shard-00001-model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
FILES = [*SHARDS, "state.json", "manifest.json"]


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(checkpoint_module, "FILE", 20_000)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "master.weight": torch.full((100, 40), float(step)),
        "master.bias": torch.full((7,), step).bfloat16(),
        "exp_avg.weight": torch.full((100, 40), -float(step)),
    }


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, tensors_of(step), {"position": step, "name": "käse"})


def held(store: CheckpointStore) -> list[str]:
    """The names in a store, each without `step-0000000`."""
    return sorted(path.name.removeprefix("step-0000000") for path in store.root.iterdir())


def assert_is(checkpoint, step: int) -> None:
    assert checkpoint.step == step
    assert checkpoint.state == {"position": step, "name": "käse"}
    found = {name: torch.empty_like(like, device="cpu") for name, like in checkpoint.tensors.items()}
    checkpoint.load(found)
    torch.testing.assert_close(found, tensors_of(step), rtol=0, atol=0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def test_what_was_saved_is_loaded_and_the_newest_are_kept(store):
    assert store.load_latest() is None
    save(store, 1, 2, 3, 4, 5)

    assert_is(store.load_latest(), 5)
    assert_is(store.load(store.root / "step-00000004"), 4)
    assert_is(store.load("step-00000003"), 3)
    assert held(store) == ["3", "4", "5"]
    store.rewind(4)
    assert held(store) == ["3", "4"]
    assert sorted(path.name for path in store.paths()[0].iterdir()) == sorted(FILES)
    assert sorted(verify(store.paths()[0])) == sorted(set(FILES) - {"manifest.json"})
    with pytest.raises(CheckpointError, match=r"step-00000009.*step-00000003"):
        store.load("step-00000009")


def test_tensors_of_any_dtype_stride_and_size_are_saved_by_value(store, contents):
    weight = torch.nn.Parameter(torch.randn(6, 8))
    views = {"a": weight, "t": weight.t(), "row": weight[2], "every_other": weight[:, ::2]}
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.uint8)
    kinds = {str(dtype)[6:]: torch.randint(0, 2, (3, 5)).to(dtype) for dtype in dtypes}
    given = views | kinds | {"scalar": kinds["int32"][0, 0], "empty": kinds["int32"][:0]}

    store.save(1, given, {})

    loaded = contents(store.load_latest())
    for name, tensor in given.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "grow"])
def test_damage_is_named_and_the_checkpoint_before_is_taken(store, file, damage, dice, caplog):
    save(store, 1, 2)
    path = store.root / "step-00000002" / file
    content = bytearray(path.read_bytes())
    if damage == "flip":
        place = dice.randrange(len(content))
        if file == "manifest.json":  # a byte that matters: a digit of a checksum
            place = content.rindex(b'"sha256": "') + 15
        content[place] ^= 1 << dice.randrange(7)
    elif damage == "truncate":
        del content[dice.randrange(len(content) - 1) :]
    path.write_bytes(content + b"\1" * (damage == "grow"))
    if damage == "delete":
        path.unlink()

    with pytest.raises(DamagedCheckpoint) as caught:
        store.load("step-00000002")

    assert f"{path.parent} is damaged" in str(caught.value)
    assert file in str(caught.value) or (file == "manifest.json" and damage == "flip")
    assert_is(store.load_latest(), 1)
    assert f"{path.parent} is damaged" in caplog.text


@pytest.mark.parametrize(
    ("damaged", "taken"), [((), 3), ((3,), 2), ((2, 3), 1), ((1, 3), 2), ((1, 2, 3), None)]
)
def test_the_newest_intact_checkpoint_is_taken(store, damaged, taken):
    save(store, 1, 2, 3)
    for step in damaged:
        (store.root / f"step-0000000{step}" / "state.json").unlink()

    if taken is None:
        with pytest.raises(DamagedCheckpoint, match=r"no checkpoint in .*step-00000003.*state\.json"):
            store.load_latest()
    else:
        assert_is(store.load_latest(), taken)
    assert held(store) == ["1", "2", "3"]


@pytest.mark.parametrize(("name", "value"), [("master.weight", math.nan), ("exp_avg.weight", -math.inf)])
def test_what_is_not_finite_is_not_saved(store, name, value):
    tensors = tensors_of(4)
    tensors[name][-1] = value

    with pytest.raises(Diverged, match=name):
        store.save(4, tensors, {})
    assert store.paths() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"state.json": {}}}, "state.json"),
        ({"files": {}}, "another checkpoint"),
        ({"step": 2}, "another checkpoint"),
        ({"format": 1}, "format 1.*the version of grpo_fast that"),
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_is_refused(store, change, message):
    save(store, 1)
    manifest = store.root / "step-00000001" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))

    with pytest.raises(CheckpointError, match=message) as caught:
        store.load_latest()
    assert isinstance(caught.value, DamagedCheckpoint) == ("format" not in change)


def keep_saving(root: Path, first: int, done) -> None:
    store = CheckpointStore(root, keep=2)
    for step in range(first, first + 10_000):
        save(store, step)
        done.value = step


def test_a_kill_at_any_moment_leaves_every_checkpoint_whole(tmp_path, dice):
    context = multiprocessing.get_context("fork")
    done = context.Value("q", 0, lock=False)  # which a kill might leave locked
    for _ in range(8):
        first = done.value + 1
        saver = context.Process(target=keep_saving, args=(tmp_path, first, done))
        saver.start()
        while done.value < first and saver.is_alive():
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


@pytest.mark.parametrize("moment", ["dcp.save", "fingerprint", "sync"])
@pytest.mark.parametrize(
    ("cause", "raised"),
    [(OSError(errno.EIO, "broken"), CheckpointSaveError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_broken_disk_or_an_interruption_fails_one_save(store, monkeypatch, moment, cause, raised):
    save(store, 1, 2)
    with monkeypatch.context() as patch, pytest.raises(raised):
        patch.setattr(f"grpo_fast.record.checkpoint.{moment}", Mock(side_effect=cause))
        save(store, 3)

    assert held(store) == ["1", "2"]
    save(store, 3)
    assert_is(store.load_latest(), 3)


def test_a_write_that_the_system_cuts_short_fails_one_save(store):
    def save_within_4_kilobytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(CheckpointSaveError):
            save(store, 2)
        os._exit(7)

    save(store, 1)
    saver = multiprocessing.get_context("fork").Process(target=save_within_4_kilobytes)
    saver.start()
    saver.join()

    assert saver.exitcode == 7 and held(store) == ["1"]
    assert_is(store.load_latest(), 1)


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(()).item()]


def test_random_states_survive_a_checkpoint(store, monkeypatch):
    random.gauss(0, 1), np.random.randn()  # each leaves a second normal number in its state
    store.save(1, {}, {"rng": capture_rng()})
    expected = [draw(), draw()]

    restore_rng(store.load_latest().state["rng"])

    assert [draw(), draw()] == expected
    if torch.cuda.is_available():
        torch.rand(1, device="cuda")
        state, expected = capture_rng(), torch.rand(5, device="cuda")
        restore_rng(state)
        assert torch.equal(torch.rand(5, device="cuda"), expected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="CUDA"):
        restore_rng({**capture_rng(), "cuda": "00"})
