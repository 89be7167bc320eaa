"""Each policy loss against its paper, written again as loops over completions and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.catalog import CATALOG, LOSS_TYPES
from grpo_fast.objective.surrogates import SURROGATES

L_MAX = 12  # dr_grpo's constant
Tokens = list[tuple[float, float]]  # (log π, log π_old) of a completion's tokens that count


def completions(batch: Any) -> list[tuple[float, Tokens]]:
    """For each completion: its advantage and its tokens."""
    rows = zip(batch.logprobs.tolist(), batch.old.tolist(), batch.mask.tolist(), strict=True)
    tokens = [[(n, o) for n, o, counts in zip(*row, strict=True) if counts] for row in rows]
    return list(zip(batch.advantages.tolist(), tokens, strict=True))


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# Terms of a token with log-probabilities n and o, of a completion with advantage a and tokens `own`.


def ppo(ratio: float, a: float, c: GRPOLossConfig) -> float:
    clipped = min(max(ratio, 1 - c.epsilon_low), 1 + c.epsilon_high)
    capped = ratio if c.delta is None else min(ratio, c.delta)
    return -min(capped * a, clipped * a)


def of_token(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    return ppo(math.exp(n - o), a, c)


def of_sequence(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    product = math.exp(sum(n for n, _ in own)) / math.exp(sum(o for _, o in own))
    return ppo(product ** (1 / len(own)), a, c)


def of_product(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    return ppo(math.prod(math.exp(n - o) for n, o in own), a, c)


def gmpo(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    product, sign = 1.0, math.copysign(1, a)
    for new, old in own:
        ratio = math.exp(new - old)
        clipped = min(max(ratio, math.exp(-c.epsilon_low)), math.exp(c.epsilon_high))
        product *= abs(min(sign * ratio, sign * clipped))
    return -a * product ** (1 / len(own))


def cispo(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    return -min(math.exp(n - o), c.epsilon_high) * a * n


def sapo(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    tau = c.sapo_temperature_pos if a > 0 else c.sapo_temperature_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1)))


def vespo(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    k, rate = (c.vespo_k_pos, c.vespo_lambda_pos) if a >= 0 else (c.vespo_k_neg, c.vespo_lambda_neg)
    log_weight = min(max(sum(n - o for n, o in own), math.log(1e-8)), 20)
    return -math.exp(rate * (1 - math.exp(log_weight)) + k * log_weight) * a * n


def reinforce(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    return -a * n


def dppo_tv(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    moved = math.exp(n) - math.exp(o)
    kept = moved <= c.epsilon_high if a > 0 else moved >= -c.epsilon_low
    return -min(math.exp(n - o), c.dppo_ratio_max) * a * n * kept


def dppo_kl(a: float, n: float, o: float, own: Tokens, c: GRPOLossConfig) -> float:
    p, q = math.exp(n), math.exp(o)
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    kept = (divergence <= c.epsilon_high or p <= q) if a > 0 else (divergence <= c.epsilon_low or p >= q)
    return -min(p / q, c.dppo_ratio_max) * a * n * kept


def over_completions(rows: list[list[float]]) -> float:
    return mean([mean(row) for row in rows])


def over_tokens(rows: list[list[float]]) -> float:
    return mean([term for row in rows for term in row])


def sum_of_tokens(rows: list[list[float]]) -> float:
    return mean([sum(row) for row in rows])


def constant_length(rows: list[list[float]]) -> float:
    return mean([sum(row) / L_MAX for row in rows])


# The term, what is done with the terms of all completions, and constants away from the defaults, so that a
# constant that is not read shows. gspo and gspo_token differ in their gradients only.
PAPERS: dict[str, tuple[Callable[..., float], Callable[..., float], dict[str, float]]] = {
    "grpo": (of_token, over_completions, {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 3.0}),
    "bnpo": (of_token, over_tokens, {"epsilon_low": 1.0, "epsilon_high": 0.2}),  # no ratio is as low
    "dr_grpo": (of_token, constant_length, {}),
    "dapo": (of_token, over_tokens, {"epsilon_low": 0.3, "epsilon_high": 0.6}),
    "reinforce_plus_plus_baseline": (of_token, over_tokens, {}),
    "gspo": (of_sequence, over_completions, {"epsilon_low": 0.1, "epsilon_high": 0.4}),
    "gspo_token": (of_sequence, over_completions, {"epsilon_low": 0.1, "epsilon_high": 0.4}),
    "luspo": (of_sequence, sum_of_tokens, {"delta": 4.0, "epsilon_low": 0.5}),
    "rloo": (of_product, over_completions, {}),
    "gmpo": (gmpo, over_completions, {"epsilon_low": 0.3, "epsilon_high": 0.7}),
    "cispo": (cispo, over_tokens, {"epsilon_high": 2.0}),
    "sapo": (sapo, over_completions, {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.9}),
    "vespo": (
        vespo,
        over_tokens,
        {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.8, "vespo_lambda_neg": 1.2},
    ),
    "gpg": (reinforce, over_tokens, {}),
    "reinforce": (reinforce, sum_of_tokens, {}),
    "dppo_tv": (dppo_tv, over_tokens, {"epsilon_low": 0.1, "epsilon_high": 0.2, "dppo_ratio_max": 5.0}),
    "dppo_kl": (dppo_kl, over_tokens, {"epsilon_low": 0.02, "epsilon_high": 0.1, "dppo_ratio_max": 5.0}),
}
KL_COV = {"kl_cov_ratio": 0.3, "kl_cov_coef": 0.5}
TRANSCRIBED = (*PAPERS, "kl_cov")


def config_for(loss_type: str) -> GRPOLossConfig:
    constants = PAPERS[loss_type][2] if loss_type in PAPERS else KL_COV if loss_type == "kl_cov" else {}
    return GRPOLossConfig(loss_type, max_completion_length=L_MAX, **constants)


def transcription(batch: Any, c: GRPOLossConfig) -> float:
    if c.loss_type == "kl_cov":
        return kl_cov(batch, c)
    term, aggregate, _ = PAPERS[c.loss_type]
    return aggregate([[term(a, n, o, own, c) for n, o in own] for a, own in completions(batch)])


def kl_cov(batch: Any, c: GRPOLossConfig) -> float:
    tokens = [(a, n, o) for a, own in completions(batch) for n, o in own]
    covariances = centred_products(tokens)
    count = max(int(c.kl_cov_ratio * len(tokens)), 1)
    highest = set(sorted(range(len(tokens)), key=lambda i: -covariances[i])[:count])
    penalty = [c.kl_cov_coef * abs(n - o) if i in highest else 0.0 for i, (_, n, o) in enumerate(tokens)]
    return mean([p - a * math.exp(n - o) for p, (a, n, o) in zip(penalty, tokens, strict=True)])


def centred_products(tokens: list[tuple[float, float, float]]) -> list[float]:
    mean_advantage, mean_logprob = mean([a for a, _, _ in tokens]), mean([n for _, n, _ in tokens])
    return [(a - mean_advantage) * (n - mean_logprob) for a, n, _ in tokens]


@pytest.mark.parametrize("loss_type", TRANSCRIBED)
def test_the_loss_is_its_papers(loss_type, make_batch):
    for empty in (False, True):
        batch, config = make_batch(empty=empty), config_for(loss_type)
        loss = policy_loss(batch.inputs(), config).loss
        assert loss.item() == pytest.approx(transcription(batch, config), rel=1e-9, abs=1e-12)


DETACHED_RATIO = ("cispo", "vespo", "dppo_tv", "dppo_kl")


@pytest.mark.parametrize("loss_type", [name for name in TRANSCRIBED if name != "gspo_token"])
def test_the_gradient_is_the_finite_difference_of_the_papers_loss(loss_type, make_batch):
    batch, config = make_batch(spread=1.5), config_for(loss_type)

    def shifted(row: int, column: int, step: float) -> float:
        logprobs, old = batch.logprobs.detach().clone(), batch.old.clone()
        logprobs[row, column] += step
        if loss_type in DETACHED_RATIO:
            old[row, column] += step  # the ratio stays, as under a stop-gradient
        return transcription(replace(batch, logprobs=logprobs, old=old), config)

    policy_loss(batch.inputs(), config).loss.backward()

    step = 1e-6
    expected = torch.zeros_like(batch.logprobs)
    for row, column in batch.mask.nonzero().tolist():
        expected[row, column] = (shifted(row, column, step) - shifted(row, column, -step)) / (2 * step)
    scale = expected.abs().max().item()
    torch.testing.assert_close(batch.logprobs.grad, expected, rtol=1e-5, atol=1e-6 * scale + 1e-9)


def test_gspo_token_has_the_gradient_of_gspo_when_a_completion_has_one_advantage(make_batch):
    batch, gradients = make_batch(spread=0.5), []
    for name in ("gspo", "gspo_token"):
        loss = policy_loss(batch.inputs(), config_for(name)).loss
        gradients += torch.autograd.grad(loss, batch.logprobs)

    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


def test_vespo_bounds_each_tokens_log_ratio_by_20_before_it_adds_them_up():
    logprobs = torch.full((8,), -1.0, dtype=torch.float64, requires_grad=True)
    log_ratio = torch.tensor(
        [-20.0, 18, -21, 18, 20, -19, 21, -19], dtype=torch.float64
    )  # of pairs of tokens
    ones, old = torch.ones_like(log_ratio), logprobs.detach() - log_ratio
    inputs = LossInputs(logprobs, ones, torch.arange(8) // 2, ones.bool(), 4, old_logprobs=old)
    config = GRPOLossConfig("vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0)

    (gradient,) = torch.autograd.grad(policy_loss(inputs, config).loss, logprobs)

    weights = [math.exp(3 * (1 - math.exp(w)) + 2 * w) for w in (-2, -2, 1, 1)]
    torch.testing.assert_close(-8 * gradient, torch.tensor(weights).double().repeat_interleave(2))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ratios_beyond_the_range_of_floats_leave_no_nan_where_the_loss_is_bounded(loss_type):
    logprobs = torch.tensor([-0.5, -300.0, -0.5], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.tensor([1.0, 1.0, 0.0]),
        sequence_ids=torch.tensor([0, 1, 2]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        num_sequences=3,
        old_logprobs=torch.tensor([-300.0, -0.5, -300.0]),
    )
    unbounded = loss_type == "kl_cov"  # r·A without a clip is infinite here, as its paper has it

    loss = policy_loss(inputs, config_for(loss_type)).loss
    loss.backward()

    assert unbounded or (torch.isfinite(loss) and torch.isfinite(logprobs.grad).all())


def test_clip_cov_drops_a_share_of_unclipped_tokens_within_the_covariance_bounds(make_batch):
    batch = make_batch(spread=0.5)
    config = GRPOLossConfig("clip_cov", clip_cov_ratio=0.2, clip_cov_low=0.05, clip_cov_high=2.0)
    tokens = [(a, n, o) for a, own in completions(batch) for n, o in own]
    terms = [ppo(math.exp(n - o), a, config) for a, n, o in tokens]
    clipped = [(a > 0 and math.exp(n - o) > 1.2) or (a < 0 and math.exp(n - o) < 0.8) for a, n, o in tokens]
    allowed = {
        i
        for i, covariance in enumerate(centred_products(tokens))
        if 0.05 < covariance < 2.0 and not clipped[i]
    }
    expected_drops = min(max(int(0.2 * len(tokens)), 1), len(allowed))

    outputs = policy_loss(batch.inputs(), config)
    gradient = torch.autograd.grad(outputs.loss, batch.logprobs)[0][batch.mask]

    # Of the tokens that would have a gradient, exactly the dropped ones have none.
    silent = {i for i in range(len(tokens)) if gradient[i] == 0 and not clipped[i] and terms[i] != 0}
    assert silent <= allowed
    assert outputs.metrics["clip_ratio/covariance_mean"].item() * len(tokens) == pytest.approx(expected_drops)
    kept = sum(term for i, term in enumerate(terms) if i not in silent)
    assert outputs.loss.item() == pytest.approx(kept / len(tokens))


def test_every_loss_type_has_a_transcription_and_a_function():
    assert {*TRANSCRIBED, "clip_cov"} == set(LOSS_TYPES)
    assert {facts.surrogate for facts in CATALOG.values()} == set(SURROGATES)
