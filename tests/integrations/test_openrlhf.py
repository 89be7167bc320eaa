"""OpenRLHF's actor and policy loss against ours in their place.

The real OpenRLHF source runs here (it must be importable); DeepSpeed, flash-attn and Ray are stubbed where
they are not installed, and flash-attn's padding helpers are written out in torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_fast import GRPOLossConfig

HERE = Path(__file__).parent
HEAVY = ("deepspeed", "flash_attn", "ray", "bitsandbytes", "torchdata", "pylatexenc", "jsonlines", "aiohttp")
if find_spec("openrlhf") is None:
    pytest.skip("openrlhf is not importable", allow_module_level=True)


def unpad_input(padded: Tensor, mask: Tensor) -> tuple[Any, ...]:
    index = mask.flatten().nonzero().squeeze(1)
    return padded.flatten(0, 1)[index], index, mask.sum(1).cumsum(0), int(mask.sum(1).max()), None


def pad_input(rows: Tensor, index: Tensor, batch: int, length: int) -> Tensor:
    flat = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, index, rows)
    return flat.view(batch, length, *rows.shape[1:])


@pytest.fixture(scope="module")
def host() -> Iterator[SimpleNamespace]:
    spec = spec_from_file_location("host_stubs", HERE / "host_stubs.py")
    stubs = module_from_spec(spec)
    spec.loader.exec_module(stubs)
    # compute_entropy is compiled at import; it runs eagerly here.
    with stubs.stubbed(*HEAVY) as absent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        if "flash_attn" in absent:
            import flash_attn.bert_padding as padding

            padding.unpad_input, padding.pad_input = unpad_input, pad_input
            padding.index_first_axis = lambda rows, index: rows[index]
            padding.rearrange = lambda rows, _: rows.flatten(0, 1)
            # No kernel: OpenRLHF then takes its own torch path.
            patch.setitem(sys.modules, "flash_attn.ops", None)
        from openrlhf.models import actor, loss

        from grpo_fast.integrations import openrlhf as adapter

        yield SimpleNamespace(actor=actor, loss=loss, adapter=adapter)
        adapter.unpatch()
        for name in [n for n in sys.modules if n == "openrlhf" or n.startswith("openrlhf.")]:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def unpatched(host: SimpleNamespace) -> Iterator[None]:
    yield
    host.adapter.unpatch()


def make_actor(host: SimpleNamespace, family: str, temperature: float, packing: bool) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    small = {
        "vocab_size": 53,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attn_implementation": "eager",
    }
    if family == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**small, head_dim=8, final_logit_softcapping=2.0))
    else:
        model = LlamaForCausalLM(LlamaConfig(**small))
    actor = host.actor.Actor(model.eval(), temperature=temperature)
    actor.packing_samples = packing
    return actor


def outputs(actor: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Log-probabilities, entropies, and gradients through both."""
    actor.zero_grad()
    logprobs, output = actor(**batch, return_output=True, return_entropy=True)
    length = logprobs.shape[1]
    scale = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    live = batch["action_mask"]
    ((scale + 0.3 * output.entropy[:, -length:] * live) * 1.0 + scale * logprobs).sum().backward()
    gradients = {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": output.entropy.detach()[:, -length:] * live} | gradients


def batch_of(rng: torch.Generator) -> dict[str, Tensor]:
    """Left-padded prompts, right-padded answers of at most 5 tokens."""
    attention = (torch.arange(10) >= torch.tensor([[0], [2], [1]])) & (
        torch.arange(10) < torch.tensor([[10], [8], [9]])
    )
    return {
        "sequences": torch.randint(0, 53, (3, 10), generator=rng),
        "attention_mask": attention.long(),
        "action_mask": attention[:, 5:],
    }


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("llama", 0.7), ("gemma2", 1.3)])
def test_log_probabilities_entropies_and_gradients_are_the_hosts(
    host: SimpleNamespace, rng: torch.Generator, family: str, temperature: float, packing: bool
) -> None:
    actor, batch = make_actor(host, family, temperature, packing), batch_of(rng)
    expected = outputs(actor, batch)

    host.adapter.patch()
    found = outputs(actor, batch)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    head = actor.model.get_output_embeddings()
    assert head is actor.model.lm_head and "forward" not in vars(head)


def test_log_probabilities_of_whole_sequences_are_the_hosts(
    host: SimpleNamespace, rng: torch.Generator
) -> None:
    actor, batch = make_actor(host, "llama", 0.9, False), batch_of(rng)
    del batch["action_mask"]
    expected = actor(**batch, return_logprobs=True)
    host.adapter.patch()
    torch.testing.assert_close(actor(**batch, return_logprobs=True), expected, rtol=1e-4, atol=2e-5)


def test_a_caller_that_wants_logits_gets_them(host: SimpleNamespace, rng: torch.Generator) -> None:
    actor, batch = make_actor(host, "llama", 1.0, False), batch_of(rng)
    del batch["action_mask"]
    expected = actor(**batch, return_output=True).logits
    host.adapter.patch()
    torch.testing.assert_close(actor(**batch, return_output=True).logits, expected)


def test_with_log_probabilities_the_logits_have_no_width(host: SimpleNamespace, rng: torch.Generator) -> None:
    host.adapter.patch()
    _, output = make_actor(host, "llama", 1.0, False)(**batch_of(rng), return_output=True)
    assert output.logits.shape == (3, 10, 0)


def test_unpatching_restores_everything(host: SimpleNamespace) -> None:
    before = (dict(vars(host.actor)), host.actor.Actor.forward, host.loss.PolicyLoss.forward)
    host.adapter.patch(GRPOLossConfig("dapo"))
    host.adapter.patch()
    assert host.loss.PolicyLoss.forward is before[2]
    host.adapter.unpatch()
    assert (dict(vars(host.actor)), host.actor.Actor.forward, host.loss.PolicyLoss.forward) == before


LOSSES = {
    "ppo": ({}, GRPOLossConfig("dapo", epsilon_low=0.2, epsilon_high=0.2)),
    "sample mean": ({"token_level_loss": False}, GRPOLossConfig("grpo", epsilon_low=0.2)),
    "dual clip": (
        {"clip_eps_high": 0.28, "dual_clip": 3.0},
        GRPOLossConfig("dapo", epsilon_low=0.2, epsilon_high=0.28, delta=3.0),
    ),
    "gspo": (
        {"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4},
        GRPOLossConfig("gspo"),
    ),
    "truncated sampler ratio": (
        {"is_correction_level": "token", "is_correction_mode": "clip"},
        GRPOLossConfig("dapo", sampler_correction="token_truncate", sampler_clip_min=0.5, sampler_clip_max=5),
    ),
    "masked sampler ratio": (
        {"is_correction_level": "token"},
        GRPOLossConfig("dapo", sampler_correction="token_mask", sampler_clip_min=0.5, sampler_clip_max=5),
    ),
}
STEP = {"dp_size": 2, "batch_num_tokens": 57.0, "global_batch_size": 8.0}


@pytest.mark.parametrize("step", [{}, STEP], ids=["own counts", "two ranks"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_policy_loss_is_the_hosts(
    host: SimpleNamespace, rng: torch.Generator, name: str, step: dict[str, float]
) -> None:
    options, config = LOSSES[name]
    old = -torch.rand(4, 9, generator=rng, dtype=torch.float64) * 3
    new = (old + 0.6 * torch.randn(4, 9, generator=rng, dtype=torch.float64)).requires_grad_()
    sampler = old + 0.6 * torch.randn(4, 9, generator=rng, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [4], [0], [6]])
    advantages = torch.randn(4, 1, generator=rng, dtype=torch.float64).expand(4, 9)
    module = host.loss.PolicyLoss(**options)

    def evaluate() -> tuple[Tensor, ...]:
        loss, *metrics = module(new, old, advantages, mask, sampler, **step)
        return (loss, torch.autograd.grad(loss, new)[0], *metrics)

    expected = evaluate()
    host.adapter.patch(config)
    found = evaluate()

    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    if name != "gspo":  # theirs counts tokens and every crossing, ours sequences that the clip acts on
        torch.testing.assert_close(found[2:], expected[2:], check_dtype=False, rtol=1e-5, atol=1e-6)


def test_terms_that_openrlhf_adds_itself_are_refused(host: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="beta"):
        host.adapter.patch(GRPOLossConfig("dapo", beta=0.1))
    with pytest.raises(ValueError, match="catalogued"):
        host.adapter.patch(GRPOLossConfig("package.module:function"))
    with pytest.raises(TypeError, match=r"such as GRPOLossConfig\('gspo'\), got 'gspo'"):
        host.adapter.patch("gspo")


def test_an_unknown_version_is_refused(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_fast.integrations.host._version", lambda *_: "0.12.1")
    with pytest.raises(ImportError, match=r"openrlhf is version 0\.12\.1, but this adapter knows 0\.11 only"):
        host.adapter.patch()


def test_the_example_runs_as_it_stands() -> None:
    import grpo_fast.examples as examples

    path = Path(next(iter(examples.__path__))) / "openrlhf_actor.py"
    assert len(path.read_text().splitlines()) <= 30
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from host_stubs import stubbed
with stubbed(*{HEAVY!r}):
    exec(compile(open({str(path)!r}).read(), "example", "exec"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "log-probabilities" in done.stdout
