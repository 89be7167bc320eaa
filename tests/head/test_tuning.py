"""The checked-in tables of sizes: what they must hold, and which rule applies to a device and a shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grpo_fast.kernels import ProductTile

from grpo_fast.head import tuning
from grpo_fast.head.plan import Device, Workload, plan_head

HOPPER = Device("cuda", (9, 0), tuning.SHARED_MEMORY[90], has_triton=True)


def table(**changes) -> tuning.Table:
    return replace(tuning.load_tables()[90], **changes)


def stored(folder: Path, found: tuning.Table, name: str = "sm_90") -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tuning.plain(found)))
    return path


def test_every_architecture_we_ship_for_has_a_sound_table_that_says_where_it_comes_from():
    tables = tuning.load_tables()

    assert sorted(tables) == sorted(tuning.SHARED_MEMORY)
    assert all(table.provenance for table in tables.values())
    assert all(tables[80].sizes(p, 4096, True).wide is None for p in ("half", "float32"))


def test_the_tables_are_installed_with_the_package():
    tomllib = pytest.importorskip("tomllib", reason="since Python 3.11")

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert "head/tables/*.json" in project["tool"]["setuptools"]["package-data"]["grpo_fast"]


@pytest.mark.parametrize(
    ("capability", "shared_memory", "architecture"),
    [
        ((8, 0), 166_912, 80),
        ((8, 6), 101_376, 89),  # newer than an A100, with less shared memory
        ((8, 7), 166_912, 80),
        ((8, 9), 101_376, 89),
        ((9, 0), 232_448, 90),
        ((10, 3), 232_448, 100),
        ((12, 1), 101_376, 120),
        ((99, 0), 1 << 20, 120),
        ((7, 5), 65_536, 89),
    ],
)
def test_a_device_takes_the_newest_table_before_it_that_fits_its_shared_memory(
    monkeypatch, capability, shared_memory, architecture
):
    tables = {
        number: replace(
            found,
            rules=tuple(replace(r, sizes=replace(r.sizes, pointer_forward=number)) for r in found.rules),
        )
        for number, found in tuning.load_tables().items()
    }
    monkeypatch.setattr(tuning, "load_tables", lambda: tables)

    found = tuning.sizes_for(capability, torch.bfloat16, 2048, True, shared_memory)

    assert found.pointer_forward == architecture


def test_the_most_particular_rule_comes_first_and_applies():
    half = table().rules[-1]
    tiles = [ProductTile(64, 128, 64, 4, stages, 8, False) for stages in (1, 2, 3)]
    small, frozen, other = (replace(half.sizes, pointer_forward=tile) for tile in tiles)
    rules = [
        replace(half, sizes=other),
        replace(half, hidden_up_to=1024, sizes=small),
        replace(half, hidden_up_to=1024, trainable=False, sizes=frozen),
    ]
    found = table(rules=(table().rules[0], *sorted(rules, key=lambda rule: rule.rank)))

    assert tuning.faults(found, "sm_90") == []
    assert found.sizes("half", 1024, True) == small
    assert found.sizes("half", 896, False) == frozen
    assert found.sizes("half", 1025, False) == other


def with_wide(*sizes: int | bool) -> tuning.Table:
    first, last = table().rules
    return table(rules=(first, replace(last, sizes=replace(last.sizes, wide=ProductTile(*sizes)))))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (table(architecture=80), "architecture"),
        (table(rules=table().rules[::-1]), "most particular"),
        (table(rules=table().rules[:1]), "no rule for every half"),
        (with_wide(128, 192, 64, 8, 4, 16, True), "powers of two"),
        (with_wide(128, 256, 64, 8, 5, 16, True), "245760 of 232448"),
        (with_wide(128, 256, 64, 8, 4, 16, False), "descriptors"),
    ],
)
def test_a_table_that_cannot_serve_is_refused(tmp_path, wrong, fault):
    with pytest.raises(ValueError, match=fault):
        tuning.read_table(stored(tmp_path, wrong))


def test_a_misspelt_key_and_a_wrong_type_are_refused(tmp_path):
    content = tuning.plain(table())
    content["rules"][0]["sizes"]["sparse"]["pair_rowz"] = 64
    (tmp_path / "sm_90.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="keys that nothing reads"):
        tuning.read_table(tmp_path / "sm_90.json")

    content["rules"][0]["sizes"]["sparse"] = {"pair_rows": "many"}
    (tmp_path / "sm_90.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"pair_rows"):
        tuning.read_table(tmp_path / "sm_90.json")


def test_cuda_kernels_are_planned_only_where_they_were_built_and_for_half_precision(monkeypatch):
    wanted = replace(table().rules[-1].sizes.sparse, cuda_rows=True, cuda_curve=True)
    sizes = replace(table().rules[-1].sizes, sparse=wanted)
    monkeypatch.setattr("grpo_fast.head.plan.sizes_for", lambda *_: sizes)
    built = replace(HOPPER, has_library=True)

    def planned(device: Device, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, bool]:
        sparse = plan_head(device, Workload(16, 1000, dtype)).sparse
        return sparse.cuda_rows, sparse.cuda_curve

    assert planned(built) == (True, True)
    assert planned(HOPPER) == (False, False)
    assert planned(built, torch.float32) == (False, False)
