from __future__ import annotations

from pathlib import Path

import pytest

from grpo_fast.plan import devices
from grpo_fast.plan.devices import device_budget, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("141GiB", 141 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("24gib", 24 * 2**30),
        ("7 kB", 7000),
        ("12B", 12),
    ],
)
def test_powers_of_two_and_of_ten_are_told_apart(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80", "80 GX", "-1GiB", "1e3GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(("count", "text"), [(3 << 29, "1.50 GiB"), (5 << 19, "2.5 MiB"), (100, "100 B")])
def test_sizes_are_shown_in_the_unit_that_suits_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [("H200", 140), ("h200", 140), ("4090", 23), ("RTX-4090", 23), ("A100-80", 80), ("141GiB", 141)],
)
def test_a_gpu_is_known_by_its_name_or_its_size(name: str, gibibytes: int) -> None:
    budget = device_budget(name)

    assert (budget.kind, budget.total >> 30) == ("cuda", gibibytes)
    assert budget.head_device.has_triton


def test_an_unknown_gpu_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'H999'.*A100-40, .*cpu"):
        device_budget("H999")


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
