"""A host of a known version, the losses it is refused, and attributes that come back."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.compat import HOSTS, Host, private
from grpo_fast.integrations.host import Replacements
from grpo_fast.integrations.losses import require_loss


@pytest.fixture
def some_host(monkeypatch) -> ModuleType:
    """A library of version 1.2.3, with a module in which one of the adapter's two names stands."""
    names = {"inner": ("present", "Class.method")}
    monkeypatch.setitem(HOSTS, "some_host", Host(">=1.2.3,<1.10", "it is slow", names))
    module, inner = ModuleType("some_host"), ModuleType("some_host.inner")
    module.__version__, inner.present, inner.Class = "1.2.3", 1, SimpleNamespace(method=2)
    monkeypatch.setitem(sys.modules, "some_host", module)
    monkeypatch.setitem(sys.modules, "some_host.inner", inner)
    return module


@pytest.mark.parametrize(
    ("version", "fits"),
    [("1.2.3", True), ("1.9.dev1", True), ("1.2.2", False), ("1.10.0", False), (None, False)],
)
def test_a_version_fits_by_whole_parts_and_an_unknown_one_does_not(some_host, version, fits):
    del some_host.__version__
    if version is not None:
        some_host.__version__ = version
    if fits:
        assert private("some_host", "inner") is sys.modules["some_host.inner"]
        return
    with pytest.raises(ImportError, match=r"install 'some-host>=1\.2\.3,<1\.10'.* until then it is slow"):
        private("some_host", "inner")


def test_a_private_name_that_is_gone_is_told_with_what_is_lost(some_host):
    del sys.modules["some_host.inner"].Class.method
    with pytest.raises(ImportError, match=r"some-host 1\.2\.3 lacks a name of inner .*'method'.* it is slow"):
        private("some_host", "inner")


@pytest.mark.parametrize("library", HOSTS)
def test_an_unknown_version_of_each_host_is_refused_in_one_sentence(library, monkeypatch):
    module = ModuleType(library)
    module.__version__ = "0.0.1"
    monkeypatch.setitem(sys.modules, library, module)
    host, name = HOSTS[library], {"swift": "ms-swift"}.get(library, library.replace("_", "-"))
    with pytest.raises(ImportError) as caught:
        private(library, next(iter(host.names)))
    assert str(caught.value) == (
        f"{name} is version 0.0.1, which this adapter does not know: install '{name}{host.versions}', "
        f"or a newer grpo-fast; until then {host.lost}"
    )


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


def test_what_was_replaced_comes_back_and_inheritance_too():
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
