"""A host of a known version, the losses it is refused, and attributes that come back."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.host import KNOWN, Replacements, require
from grpo_fast.integrations.losses import require_loss


def test_a_missing_library_is_named_with_the_versions_that_fit(monkeypatch):
    monkeypatch.setitem(KNOWN, "no_such_thing", ">=1.2")
    with pytest.raises(ImportError, match=r"no-such-thing>=1\.2"):
        require("no_such_thing")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("1.2.3", True), ("1.9.dev1", True), ("1.2.2", False), ("1.10.0", False), (None, False)],
)
def test_a_version_fits_by_whole_parts_and_an_unknown_one_does_not(version, fits, monkeypatch):
    monkeypatch.setitem(KNOWN, "some_host", ">=1.2.3,<1.10")
    module = ModuleType("some_host")
    if version is not None:
        module.__version__ = version
    monkeypatch.setitem(sys.modules, "some_host", module)
    if fits:
        require("some_host")
        return
    with pytest.raises(ImportError, match="some-host"):
        require("some_host")


@pytest.mark.parametrize(
    ("absent", "loss", "kind", "named"),
    [
        ("reference", GRPOLossConfig("dapo", beta=0.1), ValueError, "beta"),
        ("entropy", GRPOLossConfig("dapo", entropy_coef=0.1), ValueError, "entropy_coef"),
        (
            "sampler",
            GRPOLossConfig("dapo", sampler_correction="token_mask"),
            ValueError,
            "sampler_correction",
        ),
        ("reference", "cispo", TypeError, "'cispo'"),
    ],
)
def test_a_loss_that_needs_what_a_host_does_not_give_is_refused_by_its_field(absent, loss, kind, named):
    with pytest.raises(kind, match=named):
        require_loss(loss, "some-host", absent)
    require_loss(GRPOLossConfig("dapo"), "some-host", absent)


def test_what_was_replaced_comes_back_and_what_was_inherited_is_inherited_again():
    class Parent:
        static = staticmethod(abs)

        def method(self) -> str:
            return "inherited"

    class Child(Parent):
        pass

    instance, host, raw = Child(), SimpleNamespace(value=1), vars(Parent)["static"]
    with Replacements() as replacements:
        replacements.replace(Parent, "static", max)
        replacements.replace(Child, "method", lambda _: "of the class")
        replacements.replace(instance, "method", lambda: "its own")
        replacements.replace(host, "value", 2)
        replacements.replace(host, "value", 3)
        assert (instance.method(), Child().method(), host.value) == ("its own", "of the class", 3)
    assert host.value == 1 and vars(Parent)["static"] is raw
    assert instance.method() == "inherited" and not vars(instance) and "method" not in vars(Child)
