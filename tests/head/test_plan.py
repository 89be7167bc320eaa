"""Plans for devices that need not be here, and the checked-in tables of sizes that they read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from grpo_fast.kernels import ProductTile

from grpo_fast.head import operator, tuning
from grpo_fast.head.call import HeadCall
from grpo_fast.head.plan import DEFAULT_TOLERANCE, Device, Workload, plan_head

H200 = Device("cuda", (9, 0), shared_memory=232_448, has_triton=True)
A100 = Device("cuda", (8, 0), shared_memory=166_912, has_triton=True)
ADA = Device("cuda", (8, 9), shared_memory=101_376, has_triton=True)
BLACKWELL = Device("cuda", (10, 0), shared_memory=232_448, has_triton=True)
RTX = Device("cuda", (12, 0), shared_memory=101_376, has_triton=True)
MI300 = Device("cuda", shared_memory=65_536, has_triton=True, gfx="gfx942")
CPU = Device("cpu")
WORK = Workload(rows=16_384, vocabulary=151_936, dtype=torch.bfloat16)
EXACT, FROZEN = {"tolerance": 0.0}, {"jacobian": True}


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


def test_an_amd_gpu_is_known_by_its_name_and_not_by_a_capability_like_nvidias(monkeypatch):
    facts = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.version, "hip", "7.1")

    found = operator.device_facts.__wrapped__("cuda", 0)

    assert found == replace(MI300, has_triton=found.has_triton)
    assert found.architecture == "gfx942"


@pytest.mark.parametrize(
    ("device", "wide"), [(H200, True), (BLACKWELL, False), (replace(BLACKWELL, capability=(10, 3)), False)]
)
def test_a_softcap_or_what_is_kept_takes_the_wide_tile_where_it_does_not_spill(device, wide):
    for work in (replace(WORK, softcap=True), replace(WORK, keep=True, tolerance=0.0)):
        assert (plan_head(device, work).forward_tile.columns == 256) == wide
        assert plan_head(device, replace(work, extra_statistics=1)).forward_tile.columns == 128
    assert plan_head(device, replace(WORK, extra_statistics=2)).forward_tile.columns == 256


def test_a_vocabulary_that_fits_the_workspace_is_one_chunk_of_whole_tiles():
    plan = plan_head(H200, replace(WORK, rows=16, vocabulary=1000))

    assert plan.dense_columns == -(-1000 // plan.backward_tile.columns) * plan.backward_tile.columns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", [H200, A100, ADA, BLACKWELL, RTX])
def test_every_tile_fits_the_shared_memory_in_whole_mass_tiles(device, dtype):
    for softcap in (False, True):
        for extra in range(5):
            work = replace(
                WORK, dtype=dtype, softcap=softcap, extra_statistics=extra, entropy_gradient=extra > 0
            )
            plan = plan_head(device, work)

            for tile in (plan.forward_tile, plan.backward_tile):
                assert tile.shared_bytes(dtype.itemsize) <= device.shared_memory
                assert tile.columns % 128 == 0
            assert plan.dense_columns % plan.backward_tile.columns == 0


def test_datacentre_gpus_since_hopper_read_through_descriptors_unless_the_operands_are_misaligned():
    for device in (H200, BLACKWELL):
        assert plan_head(device, WORK).forward_tile.descriptors
        assert not plan_head(device, replace(WORK, aligned=False)).forward_tile.descriptors
    for device in (A100, ADA, RTX):
        assert not plan_head(device, WORK).forward_tile.descriptors


@pytest.mark.parametrize(
    ("offset", "width", "fits"), [(0, 24, True), (0, 20, False), (1, 24, False), (8, 24, True)]
)
def test_descriptors_address_rows_and_a_beginning_on_16_bytes(offset, width, fits):
    memory = torch.zeros(10 * width + offset, dtype=torch.bfloat16)

    assert operator._fits_descriptors(memory[offset:].view(10, width)) == fits


def test_what_takes_many_registers_takes_half_a_tile():
    def columns(**wanted: bool) -> int:
        work = replace(WORK, extra_statistics=HeadCall(*3 * [torch.empty(0)], **wanted).extra_statistics)
        return plan_head(H200, work).forward_tile.columns

    three = {"entropy": True, "log_sum_sq": True, "max_logit": True}
    assert columns(entropy=True, max_logit=True) == columns() == 2 * columns(**three)


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
def test_a_backward_draws_takes_up_or_is_formed_by_the_forward_as_the_call_allows(device, asked, found):
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


def table(**changes) -> tuning.Table:
    return replace(tuning.load_tables()["sm_90"], **changes)


def stored(folder: Path, content: dict) -> Path:
    path = folder / "sm_90.json"
    path.write_text(json.dumps(content))
    return path


def test_every_architecture_we_ship_for_has_a_sound_table_that_says_where_it_comes_from():
    tables = tuning.load_tables()

    assert sorted(tables) == sorted(tuning.SHARED_MEMORY)
    assert all(table.provenance for table in tables.values())
    assert all(tables["sm_80"].sizes(p, 4096, True).wide is None for p in ("half", "float32"))


@pytest.mark.parametrize(
    ("device", "shared_memory", "architecture"),
    [
        (Device("cuda", (8, 0)), 166_912, "sm_80"),
        (Device("cuda", (8, 7)), 166_912, "sm_86"),
        (Device("cuda", (8, 8)), 101_376, "sm_86"),  # newer than an A100, with less shared memory
        (Device("cuda", (8, 9)), 101_376, "sm_89"),
        (Device("cuda", (9, 0)), 232_448, "sm_90"),
        (Device("cuda", (10, 3)), 232_448, "sm_100"),
        (Device("cuda", (12, 1)), 101_376, "sm_120"),
        (Device("cuda", (99, 0)), 1 << 20, "sm_120"),
        (Device("cuda", (7, 5)), 65_536, "sm_86"),
        (Device("cuda", gfx="gfx942"), 65_536, "gfx942"),
        (Device("cuda", gfx="gfx90a"), 65_536, "sm_86"),
        (Device("cpu"), 0, "sm_86"),
    ],
)
def test_a_device_takes_its_own_table_or_the_newest_before_it_that_fits_its_shared_memory(
    monkeypatch, device, shared_memory, architecture
):
    def marked(rule: tuning.Rule, name: str) -> tuning.Rule:
        return replace(rule, sizes=replace(rule.sizes, pointer_forward=name))

    tables = {
        name: replace(found, rules=tuple(marked(rule, name) for rule in found.rules))
        for name, found in tuning.load_tables().items()
    }
    monkeypatch.setattr(tuning, "load_tables", lambda: tables)

    found = tuning.sizes_for(device.architecture, torch.bfloat16, 2048, True, shared_memory)

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
        (table(architecture="sm_80"), "architecture"),
        (table(rules=table().rules[::-1]), "most particular"),
        (table(rules=table().rules[:1]), "no rule for every half"),
        (with_wide(128, 192, 64, 8, 4, 16, True), "powers of two"),
        (with_wide(128, 256, 64, 8, 5, 16, True), "245760 of 232448"),
        (with_wide(128, 256, 64, 8, 4, 16, False), "descriptors"),
    ],
)
def test_a_table_that_cannot_serve_is_refused(tmp_path, wrong, fault):
    with pytest.raises(ValueError, match=fault):
        tuning.read_table(stored(tmp_path, tuning.plain(wrong)))


@pytest.mark.parametrize("sparse", [{"pair_rowz": 64}, {"pair_rows": "many"}])
def test_a_misspelt_key_and_a_wrong_type_are_refused(tmp_path, sparse):
    content = tuning.plain(table())
    content["rules"][0]["sizes"]["sparse"] |= sparse

    with pytest.raises(ValueError, match=r"sm_90\.json"):
        tuning.read_table(stored(tmp_path, content))
