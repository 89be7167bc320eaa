"""Plans for devices that need not be here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast.head.plan import DEFAULT_TOLERANCE, Device, Workload, plan_head

H200 = Device("cuda", (9, 0), shared_memory=232_448, has_triton=True)
A100 = Device("cuda", (8, 0), shared_memory=166_912, has_triton=True)
ADA = Device("cuda", (8, 9), shared_memory=101_376, has_triton=True)
BLACKWELL = Device("cuda", (10, 0), shared_memory=232_448, has_triton=True)
RTX = Device("cuda", (12, 0), shared_memory=101_376, has_triton=True)
CPU = Device("cpu")
WORK = Workload(rows=16_384, vocabulary=151_936, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "device", [CPU, replace(H200, has_triton=False), Device("cuda", (7, 5), 65_536, True)]
)
def test_the_reference_runs_where_the_kernels_cannot(device):
    assert plan_head(device, WORK).path == "reference"


def test_float64_always_takes_the_reference():
    assert plan_head(H200, replace(WORK, dtype=torch.float64)).path == "reference"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", [H200, A100, ADA, BLACKWELL, RTX])
def test_every_tile_fits_the_shared_memory_in_whole_mass_tiles(device, dtype):
    for softcap in (False, True):
        for extra in (False, True):
            work = replace(WORK, dtype=dtype, softcap=softcap, extra_statistics=extra, dense_gradient=extra)
            plan = plan_head(device, work)

            assert plan.path == "triton"
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


def test_the_backward_is_sparse_unless_exactness_or_a_dense_gradient_is_asked_for():
    assert plan_head(H200, WORK).backward == "sparse"
    assert plan_head(H200, WORK).tolerance == DEFAULT_TOLERANCE
    assert plan_head(H200, replace(WORK, tolerance=0.0)).backward == "dense"
    assert plan_head(H200, replace(WORK, dense_gradient=True)).backward == "dense"


def test_only_kernels_without_a_softcap_keep_what_the_backward_would_recompute():
    assert not plan_head(H200, WORK).keep
    assert plan_head(H200, replace(WORK, keep=True)).keep
    assert not plan_head(H200, replace(WORK, keep=True, softcap=True)).keep
    assert not plan_head(CPU, replace(WORK, keep=True)).keep


@pytest.mark.parametrize("rows", [0, 1, 100, 16_384, 1 << 20])
def test_memory_held_at_one_time_does_not_grow_with_the_batch(rows):
    work = replace(WORK, rows=rows)

    chunks = plan_head(CPU, work).chunks
    columns = plan_head(H200, work).dense_columns

    assert chunks.rows * chunks.columns * 4 <= 8 << 20
    assert columns == 256 or rows * columns * 2 <= 192 << 20
    assert 1 <= chunks.columns <= work.vocabulary
    assert columns < work.vocabulary + 256
