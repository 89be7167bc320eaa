"""Values and gradients of random calls against an fp64 oracle, and against full logits of the same dtype."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st


def assert_as_good_as(got, straightforward, exact, *, scale: float, what: str) -> None:
    """The error is at most the straightforward implementation's own, and a tolerance in units of `scale`."""
    same = exact.isinf() & (got.double() == exact)
    error = torch.where(same, 0, (got.double() - exact).abs())
    allowed = torch.where(same, 0, (straightforward.double() - exact).abs()).nan_to_num(nan=0.0)
    limit = 1.5 * allowed.max() + 3e-6 * scale if allowed.numel() else torch.tensor(0.0)
    assert not error.isnan().any(), f"{what} holds NaN"
    assert (error <= limit).all(), f"{what}: error {error.max():.3g}, allowed {limit:.3g}"


@st.composite
def calls(draw, Call):
    """Shapes around tile edges, every dtype, strides, masks, transforms, flat to extreme logits."""
    seed = draw(st.integers(0, 2**31 - 1))
    rng = torch.Generator().manual_seed(seed)
    rows = draw(st.sampled_from([0, 1, 2, 5, 17]))
    vocabulary = draw(st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257, 300]))
    depth = draw(st.integers(1, 33))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    # Gradients of the weight grow with the hidden states, and float16 ends at 65,504.
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 100.0 if dtype == torch.float16 else 1e4]))
    note(f"seed {seed}")

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng)

    hidden = normal(rows, 2 * depth)[:, ::2] if draw(st.booleans()) else normal(rows, depth)
    targets = torch.randint(0, vocabulary, (rows,), generator=rng)
    targets[torch.rand(rows, generator=rng) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -100
    bias = None
    if draw(st.booleans()):
        bias = normal(vocabulary)
        bias[torch.rand(vocabulary, generator=rng) < draw(st.sampled_from([0.0, 0.2]))] = -torch.inf
        bias[0] = 0.0
        bias = bias.to(dtype).requires_grad_()
    temperature = draw(st.sampled_from(["one", "scalar", "per token"]))
    temperatures = {"one": 1.0, "scalar": 0.7, "per token": torch.rand(rows, generator=rng) + 0.5}
    return Call(
        hidden=(spread * hidden).to(dtype).requires_grad_(),
        weight=(normal(vocabulary, depth) / depth**0.5).to(dtype).requires_grad_(),
        targets=targets,
        bias=bias,
        temperature=temperatures[temperature],
        logit_scale=draw(st.sampled_from([1.0, 0.25])),
        softcap=draw(st.sampled_from([None, 15.0])),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_and_gradients_are_as_good_as_full_logits_of_the_same_dtype(oracle, data):
    call = data.draw(calls(oracle.Call))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31 - 1)))
    upstream = {name: torch.randn(call.targets.shape, generator=rng) for name in ("logprob", "entropy")}
    exact_call = call.to(torch.float64)
    exact = oracle.statistics(exact_call)
    plain = oracle.statistics(call)
    logits = exact["logsumexp"].abs().clamp(max=1e30).max().item() if call.targets.numel() else 0.0

    got = call.outputs(("logprob", "entropy", "logsumexp", "log_sum_sq_probs"))

    for name, value in got.items():
        assert_as_good_as(value, plain[name], exact[name], scale=1 + logits, what=name)
    if call.targets.numel() == 0:
        return
    if call.softcap is not None:  # float32 rounds what goes into the cap, which may be far larger
        logits += 0.05 * (exact_call.hidden @ exact_call.weight.T).abs().max().item()
    found = oracle.gradients(call, got, upstream)
    wanted = oracle.gradients(exact_call, exact, upstream)
    straightforward = oracle.gradients(call, plain, upstream)
    for what, a, b, c in zip(("hidden", "weight", "bias"), found, straightforward, wanted, strict=False):
        assert a.dtype == call.hidden.dtype
        eps = torch.finfo(a.dtype).eps
        # Rounding the result, and logits that float32 cannot tell apart.
        scale = (eps / 3e-6 + 1 + logits) * (
            1 + wanted[0].abs().max().item() + c.abs().nan_to_num().max().item()
        )
        c = torch.where(c.isnan(), a.double(), c)
        assert_as_good_as(a, b.nan_to_num(), c, scale=scale, what=f"gradient of {what}")
