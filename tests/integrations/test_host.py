"""A host of a known version, and attributes that come back."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from grpo_fast.integrations.host import Replacements, require


def test_a_missing_library_is_named_with_the_versions_that_fit() -> None:
    with pytest.raises(ImportError, match=r"no-such-thing 1\.2 or 1\.3"):
        require("no_such_thing", "no-such-thing", ("1.2", "1.3"))


@pytest.mark.parametrize(
    ("version", "fits"), [("1.2", True), ("1.2.9", True), ("1.20.0", False), (None, False)]
)
def test_a_version_fits_by_whole_parts_and_an_unknown_one_does_not(
    version: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("some_host")
    if version is not None:
        module.__version__ = version
    monkeypatch.setitem(sys.modules, "some_host", module)
    if fits:
        assert require("some_host", "some-host", ("1.2",)) is module
        return
    with pytest.raises(ImportError, match="some-host"):
        require("some_host", "some-host", ("1.2",))


def test_what_was_replaced_comes_back_and_what_was_inherited_is_inherited_again() -> None:
    class Parent:
        static = staticmethod(abs)

        def method(self) -> str:
            return "inherited"

    class Child(Parent):
        pass

    instance, host, raw = Child(), SimpleNamespace(value=1), vars(Parent)["static"]
    with Replacements() as replacements:
        assert not replacements
        replacements.replace(Parent, "static", max)
        replacements.replace(Child, "method", lambda _: "of the class")
        replacements.replace(instance, "method", lambda: "its own")
        replacements.replace(host, "value", 2)
        replacements.replace(host, "value", 3)
        assert replacements and (instance.method(), Child().method()) == ("its own", "of the class")
    assert host.value == 1 and not replacements
    assert vars(Parent)["static"] is raw
    assert instance.method() == "inherited" and not vars(instance) and "method" not in vars(Child)
