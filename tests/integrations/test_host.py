"""What all adapters share: versions of hosts, refused losses, patches that are undone, examples."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from host_stubs import importable, loaded, private_names, why_missing

from grpo_fast import GRPOLossConfig, examples
from grpo_fast.integrations.compat import HOSTS, Host, private
from grpo_fast.integrations.host import Replacements
from grpo_fast.integrations.losses import require_loss


@pytest.mark.parametrize(
    ("version", "method", "refused"),
    [
        ("1.2.3", "method", None),
        ("1.9.dev1", "method", None),
        ("1.2.2", "method", r"some-dist is version 1\.2\.2, .*: install 'some-dist>=1\.2\.3,<1\.10'"),
        ("1.10.0", "method", r"some-dist is version 1\.10\.0"),
        (None, "method", "some_host cannot be imported .*: install 'some-dist>="),
        ("1.2.3", "renamed", r"some-dist 1\.2\.3 lacks a name of inner .*'method'"),
    ],
)
def test_a_host_of_another_version_or_without_a_name_is_refused(version, method, refused, monkeypatch):
    known = Host(">=1.2.3,<1.10", {"inner": "present Class.method"}, "some-dist")
    monkeypatch.setitem(HOSTS, "some_host", known)
    module, inner = ModuleType("some_host"), ModuleType("some_host.inner")
    inner.present, inner.Class = 1, SimpleNamespace(**{method: 2})
    if version is not None:
        module.__version__ = version
    monkeypatch.setitem(sys.modules, "some_host", module)
    monkeypatch.setitem(sys.modules, "some_host.inner", inner)
    if refused is None:
        assert private("some_host", "inner") is inner
        return
    with pytest.raises(ImportError, match=refused):
        private("some_host", "inner")


@pytest.mark.parametrize(
    ("absent", "options", "named"),
    [
        ("reference", {"beta": 0.1}, "beta"),
        ("entropy", {"entropy_coef": 0.1}, "entropy_coef"),
        ("sampler", {"sampler_correction": "token_mask"}, "sampler_correction"),
    ],
)
def test_a_loss_that_needs_what_a_host_lacks_is_refused_by_its_field(absent, options, named):
    with pytest.raises(ValueError, match=named):
        require_loss(GRPOLossConfig("dapo", **options), "some-host", absent)
    with pytest.raises(TypeError, match="'cispo'"):
        require_loss("cispo", "some-host", absent)
    require_loss(GRPOLossConfig("dapo"), "some-host", absent)


def test_what_was_replaced_comes_back_and_inheritance_too():
    parent = type("Parent", (), {"static": staticmethod(abs), "method": lambda self: "inherited"})
    child = type("Child", (parent,), {})
    instance, raw = child(), vars(parent)["static"]
    with Replacements() as replacements:
        replacements.replace(parent, "static", max)
        replacements.replace(child, "method", lambda self: "of the class")
        replacements.replace(instance, "method", lambda: "once")
        replacements.replace(instance, "method", lambda: "its own")
        assert (instance.method(), child().method()) == ("its own", "of the class")
    assert instance.method() == "inherited" and not vars(instance)
    assert "method" not in vars(child) and vars(parent)["static"] is raw


PATCHED_BY_IMPORT = ("skyrl", "verl")


@pytest.mark.parametrize(
    "name", [*PATCHED_BY_IMPORT, "axolotl", "nemo_rl", "openrlhf", "prime_rl", "swift", "trl"]
)
def test_a_patch_is_undone_to_the_very_objects(name):
    with loaded(name) as host:
        before = private_names(name)
        for _ in range(2):
            host.adapter.patch()
            assert private_names(name) != before
        host.adapter.unpatch()
        assert private_names(name) == before
        assert host.patched_by_import == (name in PATCHED_BY_IMPORT)


EXAMPLES: dict[str, tuple[str, Callable[[dict[str, Any], str], Any]]] = {
    "huggingface_sft": ("", lambda names, printed: "'loss'" in printed),
    "liger_grpo": ("", lambda names, printed: names["head"].weight.grad.any() and "KL" in printed),
    "nemo_rl_loss": ("nemo_rl", lambda names, _: names["current"].grad.any()),
    "openrlhf_actor": ("openrlhf", lambda names, _: names["model"].lm_head.weight.grad.any()),
    "prime_rl_loss": ("prime_rl", lambda names, _: names["loss"](names["sample"]).loss.isfinite()),
    "trl_patch": ("trl", lambda names, _: names["trainer"].state.global_step == 4),
    "trl_trainer": ("trl", lambda names, _: names["trainer"].fallback_reason is None),
    "verl_losses": ("verl", lambda names, printed: "loss_mode=grpo_fast_dapo" in printed),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_as_it_stands(name, tmp_path, monkeypatch, capsys):
    host, holds = EXAMPLES[name]
    if host and (reason := why_missing(host)):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    with importable(host) if host else nullcontext():
        names = runpy.run_path(f"{examples.__path__[0]}/{name}.py")
        assert holds(names, capsys.readouterr().out)
