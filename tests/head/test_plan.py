"""Plans for devices without the devices, and the table of sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grpo_fast.kernels import TILE, ProductTile

from grpo_fast.head import operator, tuning
from grpo_fast.head.plan import DEFAULT_TOLERANCE, Device, Workload, plan_head

H200 = Device("cuda", (9, 0), shared_memory=232_448, has_triton=True)
A100 = Device("cuda", (8, 0), shared_memory=166_912, has_triton=True)
BLACKWELL = Device("cuda", (10, 0), shared_memory=232_448, has_triton=True)
MI300 = Device("cuda", shared_memory=65_536, has_triton=True, gfx="gfx942")
CPU = Device("cpu")
WORK = Workload(rows=16_384, vocabulary=151_936, dtype=torch.bfloat16)
EXACT, FROZEN = {"tolerance": 0.0}, {"jacobian": True}
DESCRIPTORS = {"half": ("sm_90", "sm_100"), "float32": ("sm_90",)}


@pytest.mark.parametrize(
    ("device", "dtype", "path"),
    [
        (H200, torch.bfloat16, "triton"),
        (H200, torch.float64, "reference"),
        (CPU, torch.bfloat16, "reference"),
        (replace(H200, has_triton=False), torch.bfloat16, "reference"),
        (Device("cuda", (7, 5), 65_536, True), torch.float16, "reference"),
        (MI300, torch.bfloat16, "triton"),
        (replace(MI300, gfx="gfx90a"), torch.bfloat16, "reference"),
    ],
)
def test_the_reference_runs_where_the_kernels_cannot(device, dtype, path):
    assert plan_head(device, replace(WORK, dtype=dtype)).backend == path


def test_an_amd_gpu_is_known_by_its_name_and_not_by_a_capability(monkeypatch):
    facts = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.version, "hip", "7.1")

    found = operator.device_facts.__wrapped__("cuda", 0)

    assert found == replace(MI300, has_triton=found.has_triton)
    assert found.architecture == "gfx942"


@pytest.mark.parametrize(
    ("device", "wide"), [(H200, True), (BLACKWELL, False), (replace(BLACKWELL, capability=(10, 3)), False)]
)
def test_the_wide_tile_is_taken_where_it_does_not_spill(device, wide):
    assert plan_head(device, WORK).forward_tile.descriptors
    assert not plan_head(device, replace(WORK, aligned=False)).forward_tile.descriptors
    assert not plan_head(A100, WORK).forward_tile.descriptors
    for work in (replace(WORK, softcap=True), replace(WORK, keep=True, tolerance=0.0)):
        assert (plan_head(device, work).forward_tile.columns == 256) == wide
        assert plan_head(device, replace(work, extra_statistics=1)).forward_tile.columns == 128
    for extra, columns in ((2, 256), (3, 128)):
        assert plan_head(device, replace(WORK, extra_statistics=extra)).forward_tile.columns == columns


@pytest.mark.parametrize(
    ("offset", "width", "fits"), [(0, 24, True), (0, 20, False), (1, 24, False), (8, 24, True)]
)
def test_descriptors_need_an_alignment_of_16_bytes(offset, width, fits):
    memory = torch.zeros(10 * width + offset, dtype=torch.bfloat16)

    assert operator._fits_descriptors(memory[offset:].view(10, width)) == fits


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [
        (H200, {}, {"backward": "sparse", "tolerance": DEFAULT_TOLERANCE, "keep": False}),
        (H200, {"entropy_gradient": True}, {"backward": "sparse"}),
        *((H200, exact, {"backward": "dense"}) for exact in (EXACT, {"mean_gradient": True})),
        (H200, {"vocabulary": 600_000}, {"backward": "dense"}),
        *((CPU, {"tolerance": given}, {"backward": "dense", "tolerance": 0.0}) for given in (None, 0.5)),
        # Only kernels without a softcap keep what the backward would recompute.
        (H200, {"keep": True}, {"keep": True}),
        (H200, {"keep": True, "softcap": True}, {"keep": False}),
        (CPU, {"keep": True}, {"keep": False}),
        # The exact gradient of a frozen head is formed by the forward, in chunks of rows.
        (H200, FROZEN, {"jacobian": False}),
        (H200, FROZEN | EXACT, {"jacobian": True, "keep": False, "jacobian_rows": 2048}),
        (H200, FROZEN | EXACT | {"softcap": True}, {"jacobian": False}),
        (H200, FROZEN | {"keep": True}, {"jacobian": True, "keep": False}),
        (CPU, FROZEN | {"softcap": True}, {"jacobian": True}),
    ],
    ids=str,
)
def test_the_plan_samples_keeps_or_prepares_the_gradient_as_the_call_allows(device, asked, found):
    plan = plan_head(device, replace(WORK, **asked))

    assert {name: getattr(plan, name) for name in found} == found
    assert plan.jacobian_rows % plan.forward_tile.rows == 0


@pytest.mark.parametrize("rows", [0, 1, 100, 16_384, 1 << 20])
def test_memory_held_at_one_time_does_not_grow_with_the_batch(rows):
    work = replace(WORK, rows=rows)

    chunks = plan_head(CPU, work).chunks
    columns = plan_head(H200, work).dense_columns

    assert chunks.rows * chunks.columns * 4 <= 8 << 20
    assert 1 <= chunks.columns <= work.vocabulary
    assert chunks.columns % 128 == 0 or chunks.columns == work.vocabulary
    assert columns == 256 or rows * columns * 2 <= 192 << 20
    assert columns < work.vocabulary + 256


@pytest.mark.parametrize("precision", ["half", "float32"])
@pytest.mark.parametrize("architecture", tuning.SHARED_MEMORY)
def test_each_architecture_has_tiles_that_launch_and_fit_its_memory(architecture, precision):
    sizes, itemsize = tuning.TABLE[architecture][precision], 2 if precision == "half" else 4

    tiles = {name: tile for name, tile in vars(sizes).items() if isinstance(tile, ProductTile)}
    for name, tile in tiles.items():
        held = replace(tile, stages=tile.stages - architecture.startswith("gfx"))  # AMD has one in registers
        assert held.shared_bytes(itemsize) <= tuning.SHARED_MEMORY[architecture]
        assert tile.descriptors == (name in ("wide", "narrow"))
        assert tile.columns % TILE == 0
        assert all(n & (n - 1) == 0 for n in (tile.rows, tile.columns, tile.depth))
    assert ("wide" in tiles) == ("narrow" in tiles) == (architecture in DESCRIPTORS[precision])


@pytest.mark.parametrize(
    ("architecture", "shared_memory", "row"),
    [
        *(("sm_80", 166_912, "sm_80"), ("sm_87", 166_912, "sm_86"), ("sm_89", 101_376, "sm_89")),
        ("sm_88", 101_376, "sm_86"),  # newer than an A100, with less shared memory
        *(("sm_90", 232_448, "sm_90"), ("sm_103", 232_448, "sm_100"), ("sm_121", 101_376, "sm_120")),
        *(("sm_990", 1 << 20, "sm_120"), ("sm_75", 65_536, "sm_86"), ("sm_00", 0, "sm_86")),
        *(("gfx942", 65_536, "gfx942"), ("gfx90a", 65_536, "sm_86")),
    ],
)
def test_a_device_takes_its_row_or_the_newest_before_it_that_fits(
    monkeypatch, architecture, shared_memory, row
):
    monkeypatch.setattr(tuning, "TABLE", {name: {"half": name} for name in tuning.TABLE})

    assert tuning.sizes_for(architecture, torch.bfloat16, shared_memory) == row
