"""Files of a run's folder are whole at every moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_fast.run_record import files as run_dir


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"old and long")

    run_dir.write_whole(path, b"new")

    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_before_the_exchange_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"old")

    def killed(*_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_dir.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run_dir.write_whole(path, b"new")

    assert path.read_bytes() == b"old"
