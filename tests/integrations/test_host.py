"""What adapters share: versions, and losses of padded batches."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.host import require
from grpo_fast.integrations.padded import own_totals, padded_local_loss, padded_policy_loss
from grpo_fast.objective import StepTotals


def test_a_missing_library_is_named_with_the_versions_that_fit() -> None:
    with pytest.raises(ImportError, match=r"this adapter needs no-such-thing 1\.2 or 1\.3"):
        require("no_such_thing", "no-such-thing", ("1.2", "1.3"))


@pytest.mark.parametrize(("version", "fits"), [("1.2", True), ("1.2.9", True), ("1.20.0", False)])
def test_a_version_fits_by_whole_parts(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("some_host")
    module.__version__ = version
    monkeypatch.setitem(__import__("sys").modules, "some_host", module)
    if fits:
        assert require("some_host", "some-host", ("1.2",)) is module
        return
    with pytest.raises(ImportError, match=r"knows 1\.2 only; install 'some-host==1\.2\.\*'"):
        require("some_host", "some-host", ("1.2",))


def test_a_library_of_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "some_host", ModuleType("some_host"))
    with pytest.raises(ImportError, match="its version is unknown"):
        require("some_host", "some-host", ("1.2",))


def test_masked_entries_are_never_read(rng: torch.Generator) -> None:
    mask = torch.rand(3, 6, generator=rng) < 0.6
    mask[0, 0] = True
    logprobs = torch.randn(3, 6, generator=rng).masked_fill(~mask, torch.nan).requires_grad_()
    advantages = torch.randn(3, 6, generator=rng).masked_fill(~mask, torch.inf)
    padded_policy_loss(
        GRPOLossConfig("dapo"), mask, None, logprobs=logprobs, advantages=advantages
    ).loss.backward()
    assert logprobs.grad.isfinite().all() and not logprobs.grad[~mask].any()


@pytest.mark.parametrize("name", ["dapo", "grpo", "luspo"])
def test_local_and_shared_metrics_belong_to_one_loss(name: str, rng: torch.Generator) -> None:
    mask = torch.rand(3, 6, generator=rng) < 0.7
    mask[:, 0] = True
    tensors = {
        "logprobs": torch.randn(3, 6, generator=rng),
        "old_logprobs": torch.randn(3, 6, generator=rng),
        "advantages": torch.randn(3, generator=rng),
    }
    totals = StepTotals(num_tokens=40, num_sequences=9)
    config = GRPOLossConfig(name)
    shared = padded_policy_loss(config, mask, totals, **tensors)
    local = padded_local_loss(config, mask, totals, **tensors)
    torch.testing.assert_close(local.loss, shared.loss)
    own = padded_policy_loss(config, mask, own_totals(mask), **tensors)
    torch.testing.assert_close(local.metrics, own.metrics)


def test_policy_weights_scale_each_tokens_term(rng: torch.Generator) -> None:
    mask = torch.ones(2, 5)
    logprobs, old, weights = (torch.rand(2, 5, generator=rng) for _ in range(3))
    config = GRPOLossConfig("dapo")

    def loss(advantages: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return padded_policy_loss(
            config, mask, None, logprobs=logprobs, old_logprobs=old, advantages=advantages, **more
        ).loss

    advantages = torch.randn(2, 5, generator=rng)
    # The clipped term is linear in the advantage.
    torch.testing.assert_close(loss(advantages, policy_weights=weights), loss(advantages * weights))


def test_an_empty_sequence_is_not_counted() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert own_totals(mask) == StepTotals(num_tokens=2.0, num_sequences=1.0)
