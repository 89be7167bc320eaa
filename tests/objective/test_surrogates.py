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
TRANSCRIPTIONS: dict[str, Callable[..., float]] = {}


def transcribes(*names: str) -> Callable[[Callable[..., float]], Callable[..., float]]:
    def register(function: Callable[..., float]) -> Callable[..., float]:
        TRANSCRIPTIONS.update(dict.fromkeys(names, function))
        return function

    return register


def completions(batch: Any) -> list[tuple[float, list[tuple[float, float]]]]:
    """For each completion: its advantage, and (log π, log π_old) of its tokens that count."""
    rows = zip(batch.logprobs.tolist(), batch.old.tolist(), batch.mask.tolist(), strict=True)
    tokens = [[(n, o) for n, o, counts in zip(*row, strict=True) if counts] for row in rows]
    return list(zip(batch.advantages.tolist(), tokens, strict=True))


def ppo(ratio: float, advantage: float, c: GRPOLossConfig) -> float:
    clipped = min(max(ratio, 1 - c.epsilon_low), 1 + c.epsilon_high)
    capped = ratio if c.delta is None else min(ratio, c.delta)
    return -min(capped * advantage, clipped * advantage)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def mean_over_completions(batch: Any, per_completion: Callable[[float, list], float]) -> float:
    return mean([per_completion(a, tokens) if tokens else 0.0 for a, tokens in completions(batch)])


def mean_over_tokens(batch: Any, per_token: Callable[[float, float, float], float]) -> float:
    return mean([per_token(a, new, old) for a, tokens in completions(batch) for new, old in tokens])


@transcribes("grpo")
def grpo(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_completions(
        batch, lambda a, tokens: mean([ppo(math.exp(n - o), a, c) for n, o in tokens])
    )


@transcribes("dapo", "bnpo", "reinforce_plus_plus_baseline")
def dapo(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_tokens(batch, lambda a, n, o: ppo(math.exp(n - o), a, c))


@transcribes("dr_grpo")
def dr_grpo(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_completions(
        batch, lambda a, tokens: sum(ppo(math.exp(n - o), a, c) for n, o in tokens) / L_MAX
    )


def sequence_ratio(tokens: list) -> float:
    return (math.exp(sum(n for n, _ in tokens)) / math.exp(sum(o for _, o in tokens))) ** (1 / len(tokens))


@transcribes("gspo", "gspo_token")  # the two differ in their gradients only, see the test below
def gspo(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_completions(batch, lambda a, tokens: ppo(sequence_ratio(tokens), a, c))


@transcribes("luspo")
def luspo(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_completions(batch, lambda a, tokens: len(tokens) * ppo(sequence_ratio(tokens), a, c))


@transcribes("rloo")
def rloo(batch: Any, c: GRPOLossConfig) -> float:
    def one(a: float, tokens: list) -> float:
        ratio = math.exp(sum(n for n, _ in tokens) - sum(o for _, o in tokens))
        return ppo(ratio, a, c)

    return mean_over_completions(batch, one)


@transcribes("gmpo")
def gmpo(batch: Any, c: GRPOLossConfig) -> float:
    def one(a: float, tokens: list) -> float:
        product = 1.0
        for new, old in tokens:
            ratio = math.exp(new - old)
            clipped = min(max(ratio, math.exp(-c.epsilon_low)), math.exp(c.epsilon_high))
            sign = math.copysign(1, a)
            product *= abs(min(sign * ratio, sign * clipped))
        return -a * product ** (1 / len(tokens))

    return mean_over_completions(batch, one)


@transcribes("cispo")
def cispo(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_tokens(batch, lambda a, n, o: -min(math.exp(n - o), c.epsilon_high) * a * n)


@transcribes("sapo")
def sapo(batch: Any, c: GRPOLossConfig) -> float:
    def gate(a: float, n: float, o: float) -> float:
        tau = c.sapo_temperature_pos if a > 0 else c.sapo_temperature_neg
        return 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1)))

    return mean_over_completions(batch, lambda a, tokens: -a * mean([gate(a, n, o) for n, o in tokens]))


@transcribes("vespo")
def vespo(batch: Any, c: GRPOLossConfig) -> float:
    terms = []
    for a, tokens in completions(batch):
        k, rate = (c.vespo_k_pos, c.vespo_lambda_pos) if a >= 0 else (c.vespo_k_neg, c.vespo_lambda_neg)
        log_weight = min(max(sum(n - o for n, o in tokens), math.log(1e-8)), 20)
        phi = math.exp(rate * (1 - math.exp(log_weight)) + k * log_weight)
        terms += [-phi * a * n for n, _ in tokens]
    return mean(terms)


@transcribes("gpg")
def gpg(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_tokens(batch, lambda a, n, o: -a * n)


@transcribes("reinforce")
def reinforce(batch: Any, c: GRPOLossConfig) -> float:
    return mean_over_completions(batch, lambda a, tokens: -a * sum(n for n, _ in tokens))


@transcribes("kl_cov")
def kl_cov(batch: Any, c: GRPOLossConfig) -> float:
    tokens = [(a, n, o) for a, kept in completions(batch) for n, o in kept]
    covariances = centred_products(tokens)
    count = max(int(c.kl_cov_ratio * len(tokens)), 1)
    highest = set(sorted(range(len(tokens)), key=lambda i: -covariances[i])[:count])
    penalty = [c.kl_cov_coef * abs(n - o) if i in highest else 0.0 for i, (_, n, o) in enumerate(tokens)]
    return mean([p - a * math.exp(n - o) for p, (a, n, o) in zip(penalty, tokens, strict=True)])


def centred_products(tokens: list[tuple[float, float, float]]) -> list[float]:
    mean_advantage, mean_logprob = mean([a for a, _, _ in tokens]), mean([n for _, n, _ in tokens])
    return [(a - mean_advantage) * (n - mean_logprob) for a, n, _ in tokens]


@transcribes("dppo_tv")
def dppo_tv(batch: Any, c: GRPOLossConfig) -> float:
    def one(a: float, n: float, o: float) -> float:
        moved = math.exp(n) - math.exp(o)
        kept = moved <= c.epsilon_high if a > 0 else moved >= -c.epsilon_low
        return -min(math.exp(n - o), c.dppo_ratio_max) * a * n * kept

    return mean_over_tokens(batch, one)


@transcribes("dppo_kl")
def dppo_kl(batch: Any, c: GRPOLossConfig) -> float:
    def one(a: float, n: float, o: float) -> float:
        p, q = math.exp(n), math.exp(o)
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        kept = (divergence <= c.epsilon_high or p <= q) if a > 0 else (divergence <= c.epsilon_low or p >= q)
        return -min(p / q, c.dppo_ratio_max) * a * n * kept

    return mean_over_tokens(batch, one)


# Constants away from the defaults, so that a constant that is not read shows.
CONSTANTS: dict[str, dict[str, Any]] = {
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 3.0},
    "dapo": {"epsilon_low": 0.3, "epsilon_high": 0.6},
    "gspo": {"epsilon_low": 0.1, "epsilon_high": 0.4},
    "luspo": {"delta": 4.0, "epsilon_low": 0.5},
    "gmpo": {"epsilon_low": 0.3, "epsilon_high": 0.7},
    "cispo": {"epsilon_high": 2.0},
    "sapo": {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.9},
    "vespo": {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.8, "vespo_lambda_neg": 1.2},
    "kl_cov": {"kl_cov_ratio": 0.3, "kl_cov_coef": 0.5},
    "dppo_tv": {"epsilon_low": 0.1, "epsilon_high": 0.2, "dppo_ratio_max": 5.0},
    "dppo_kl": {"epsilon_low": 0.02, "epsilon_high": 0.1, "dppo_ratio_max": 5.0},
}


def config_for(loss_type: str) -> GRPOLossConfig:
    return GRPOLossConfig(loss_type, max_completion_length=L_MAX, **CONSTANTS.get(loss_type, {}))


@pytest.mark.parametrize("empty", [False, True], ids=["", "one completion masked out"])
@pytest.mark.parametrize("loss_type", list(TRANSCRIPTIONS))
def test_the_loss_is_its_papers(loss_type, empty, make_batch):
    batch, config = make_batch(empty=empty), config_for(loss_type)

    loss = policy_loss(batch.inputs(), config).loss

    expected = TRANSCRIPTIONS[loss_type](batch, config)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


DETACHED_RATIO = ("cispo", "vespo", "dppo_tv", "dppo_kl")


@pytest.mark.parametrize("loss_type", [name for name in TRANSCRIPTIONS if name != "gspo_token"])
def test_the_gradient_is_the_finite_difference_of_the_papers_loss(loss_type, make_batch):
    batch, config = make_batch(spread=1.5), config_for(loss_type)
    transcription = TRANSCRIPTIONS[loss_type]

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
    batch = make_batch(spread=0.5)

    gradients = []
    for name in ("gspo", "gspo_token"):
        loss = policy_loss(batch.inputs(), GRPOLossConfig(name, epsilon_low=0.1, epsilon_high=0.4)).loss
        gradients += torch.autograd.grad(loss, batch.logprobs)

    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


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
    tokens = [(a, n, o) for a, kept in completions(batch) for n, o in kept]
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
    assert set(TRANSCRIPTIONS) | {"clip_cov"} == set(LOSS_TYPES)
    assert {facts.surrogate for facts in CATALOG.values()} == set(SURROGATES)
