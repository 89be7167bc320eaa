from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_fast.head.plan import Device
from grpo_fast.plan import devices
from grpo_fast.plan.devices import device_budget


@pytest.mark.parametrize(
    ("total", "names"),
    [
        (143771 << 20, ["H200", "h200"]),
        (24564 << 20, ["RTX-4090", "rtx4090", "RTX 4090"]),
        (81920 << 20, ["A100-80", "a100 80"]),
        (141 * 2**30, ["141GiB"]),
        (80 * 10**9, ["80GB"]),
        (3 * 2**19, ["1.5 MiB"]),
    ],
)
def test_a_gpu_is_known_by_its_name_or_its_size(total: int, names: list[str]) -> None:
    found = [device_budget(name) for name in names]

    assert {(budget.kind, budget.total, budget.has_triton) for budget in found} == {("cuda", total, True)}


@pytest.mark.parametrize("name", ["H999", "", "GiB", "80 GX", "-1GiB", "1e3GB", "5080", "A100", "H100 MIG"])
def test_an_unknown_gpu_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*A100-40, .*cpu"):
        device_budget(name)


@pytest.mark.parametrize("limit", ["1000", "max"])
def test_a_container_plans_with_its_own_limit_where_it_has_one(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = "anon 700\nactive_file 50\ninactive_file 30\n"
    for name, text in {"max": limit, "current": "780\n", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)

    found = device_budget("cpu").total

    assert found == 1000 - 780 + 80 if limit == "1000" else found > 1 << 20


def test_this_gpu_has_its_own_memory_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Device("cuda", (9, 9), 7, has_triton=True, gfx="gfx942")
    monkeypatch.setattr(devices, "device_facts", lambda *_: facts)
    known = {"is_available": True, "current_device": 0, "get_device_name": "Mystery", "memory_reserved": 100}
    for function, value in {**known, "mem_get_info": (1 << 30, 8 << 30)}.items():
        monkeypatch.setattr(devices.torch.cuda, function, lambda *_, value=value: value)

    found = device_budget()

    assert (found.name, found.capability, found.gfx) == ("Mystery", (9, 9), "gfx942")
    assert found.total == (1 << 30) + 100 + devices.CUDA_CONTEXT
    assert 1 << 20 < found.host < sys.maxsize
