"""Each loss against a transcription of its paper, its gradient against differences, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from grpo_fast.config.lookup import given
from grpo_fast.objective.comparisons import PREFERENCE_LOSSES
from grpo_fast.objective.pairs import (
    PreferenceInputs,
    PreferenceLossConfig,
    PreferenceTotals,
    kto_reference_point,
    preference_loss,
)

CONSTANTS = {  # that leave no term at zero
    "label_smoothing": 0.2,
    "gamma": 0.7,
    "cpo_alpha": 0.3,
    "desirable_weight": 1.5,
    "undesirable_weight": 0.5,
}
every_loss = pytest.mark.parametrize("name", PREFERENCE_LOSSES)


def settings(name, beta=None):
    reads = PREFERENCE_LOSSES[name].fields
    constants = {key: value for key, value in CONSTANTS.items() if key in reads}
    return PreferenceLossConfig(name, beta=beta, **constants)


@pytest.fixture
def make_inputs(make_pairs, rng):
    """With all that the loss reads: KTO's reference point, margins and weights."""

    def make(name, chosen=7, rejected=None):
        facts, more = PREFERENCE_LOSSES[name], {}
        if not facts.paired:
            more["kl"] = torch.tensor(0.4, dtype=torch.float64)
        if facts.takes_margins:
            more["margins"] = torch.randn(chosen, generator=rng, dtype=torch.float64).requires_grad_()
        count = chosen if facts.paired else chosen + (chosen if rejected is None else rejected)
        more["weights"] = torch.rand(count, generator=rng, dtype=torch.float64).requires_grad_()
        return make_pairs(chosen, rejected, **more)

    return make


def sigma(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean_logprob):
    p = math.exp(mean_logprob)
    return math.log(p / (1 - p))


def transcription(name, i, c):
    """The paper's formula, pair by pair, in Python's own floats."""
    win, lose = i.chosen_logprobs.tolist(), i.rejected_logprobs.tolist()
    ref_win, ref_lose = i.ref_chosen_logprobs.tolist(), i.ref_rejected_logprobs.tolist()
    n_win, n_lose = i.chosen_lengths.tolist(), i.rejected_lengths.tolist()
    eps, beta = c.label_smoothing, c.beta
    wins = [w - r for w, r in zip(win, ref_win, strict=True)]
    losses = [w - r for w, r in zip(lose, ref_lose, strict=True)]
    if name == "kto":
        z = i.kl.item()
        terms = [c.desirable_weight * (1 - sigma(beta * (w - z))) for w in wins]
        terms += [c.undesirable_weight * (1 - sigma(beta * (z - l))) for l in losses]
        return sum(w * term for w, term in zip(i.weights.tolist(), terms, strict=True)) / len(terms)

    def smoothed(z):
        return -(1 - eps) * math.log(sigma(z)) - eps * math.log(sigma(-z))

    def robust(z):
        # (1 − ε) L(chosen ≻ rejected) − ε L(rejected ≻ chosen), over 1 − 2ε
        return ((1 - eps) * -math.log(sigma(z)) - eps * -math.log(sigma(-z))) / (1 - 2 * eps)

    per_token = [(w / nw, l / nl) for w, nw, l, nl in zip(win, n_win, lose, n_lose, strict=True)]
    h = [w - l for w, l in zip(wins, losses, strict=True)]
    means = [w / nw - l / nl for w, l, nw, nl in zip(wins, losses, n_win, n_lose, strict=True)]
    gaps = [w - l for w, l in zip(win, lose, strict=True)]
    m = [0.0] * len(h) if i.margins is None else i.margins.tolist()
    odds = [(a, log_odds(a) - log_odds(b)) for a, b in per_token]
    terms = {  # the margin stands where ODPO (arXiv 2402.10571) has its offset: −log σ(β Δ − margin)
        "sigmoid": lambda: [-math.log(sigma(beta * x - d)) for x, d in zip(h, m, strict=True)],
        "cdpo": lambda: [smoothed(beta * x - d) for x, d in zip(h, m, strict=True)],
        "robust": lambda: [robust(beta * x - d) for x, d in zip(h, m, strict=True)],
        "ipo": lambda: [(x - d / beta - 1 / (2 * beta)) ** 2 for x, d in zip(means, m, strict=True)],
        "hinge": lambda: [max(0.0, 1 - beta * x + d) for x, d in zip(h, m, strict=True)],
        "simpo": lambda: [
            smoothed(beta * a - beta * b - c.gamma - d) for (a, b), d in zip(per_token, m, strict=True)
        ],
        "orpo": lambda: [-a - beta * math.log(sigma(x - d)) for (a, x), d in zip(odds, m, strict=True)],
        "cpo": lambda: [
            smoothed(beta * x - d) - c.cpo_alpha * w * len(win) / sum(n_win)
            for x, w, d in zip(gaps, win, m, strict=True)
        ],
        "sft": lambda: [-w * len(win) / sum(n_win) for w in win],
    }[name]()
    return sum(w * term for w, term in zip(i.weights.tolist(), terms, strict=True)) / len(terms)


@every_loss
def test_a_loss_is_its_papers_formula_with_margins_and_weights(name, make_inputs):
    for beta in (0.05, 0.4, 3.0):
        for counts in [(7, 7), (1, 1)] if PREFERENCE_LOSSES[name].paired else [(5, 3), (0, 4), (1, 0)]:
            inputs, config = make_inputs(name, *counts), settings(name, beta)
            loss = preference_loss(inputs, config).loss
            expected = transcription(name, inputs, config)
            torch.testing.assert_close(loss.item(), expected, rtol=1e-10, atol=1e-12)


def test_ktos_reference_point_is_a_mean_log_ratio_of_at_least_zero():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    above = kto_reference_point(logprobs, torch.tensor([-2.0, -4.0]))
    below = kto_reference_point(logprobs, torch.tensor([0.0, 0.0]))
    assert (above.item(), below.item(), above.requires_grad) == (1.5, 0.0, False)


@every_loss
def test_gradients_agree_with_differences_and_reach_no_margin_or_weight(name, make_inputs):
    inputs, config = make_inputs(name), settings(name)

    def loss(chosen, rejected):
        return preference_loss(
            replace(inputs, chosen_logprobs=chosen, rejected_logprobs=rejected), config
        ).loss

    assert torch.autograd.gradcheck(loss, (inputs.chosen_logprobs, inputs.rejected_logprobs))
    preference_loss(inputs, config).loss.backward()
    assert all(t is None or t.grad is None for t in (inputs.margins, inputs.weights))


@every_loss
def test_micro_batches_add_up_to_the_step(name, make_inputs):
    inputs, config = make_inputs(name, 9), settings(name)
    totals = PreferenceTotals(9, 9, int(inputs.chosen_lengths.sum()))

    def part(rows):
        tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        own = {k: t[rows] for k, t in tensors.items() if getattr(t, "ndim", 0)}
        if name == "kto":
            own["weights"] = torch.cat([half[rows] for half in inputs.weights.split(9)])
        return replace(inputs, **own, totals=totals)

    whole = preference_loss(inputs, config)
    parts = [preference_loss(part(rows), config) for rows in (slice(0, 2), slice(2, 3), slice(3, 9))]

    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    for metric, value in whole.metrics.items():
        shares = torch.stack([p.metrics[metric] for p in parts])
        combined = {"max": shares.amax, "min": shares.amin}.get(metric[-3:], shares.sum)()
        torch.testing.assert_close(combined, value, msg=metric)


def test_custom_losses_read_columns_and_take_their_weight_in_a_sum(make_pairs):
    inputs = make_pairs()
    syntax = torch.randn(7, dtype=torch.float64)
    inputs = replace(inputs, columns={"syntax": syntax}, weights=torch.rand(7, dtype=torch.float64))

    def syntax_aware(s):
        return -torch.nn.functional.logsigmoid(s.beta * (s.chosen - s.rejected) + 2 * s.columns["syntax"])

    def short(s):
        return -s.inputs.chosen_logprobs / s.inputs.chosen_lengths

    config = PreferenceLossConfig(
        ["sigmoid", "mine:short@python", "mine:syntax_aware@python"], [1.0, 0.1, 0.2], columns=["syntax"]
    )
    with given({"mine:short@python": short, "mine:syntax_aware@python": syntax_aware}):
        found = preference_loss(inputs, config)

    terms = []
    columns = (inputs.chosen_logprobs, inputs.ref_chosen_logprobs, inputs.rejected_logprobs)
    columns += (inputs.ref_rejected_logprobs, inputs.chosen_lengths, syntax, inputs.weights)
    for win, ref_win, lose, ref_lose, length, score, weight in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        z = 0.1 * (win - ref_win - lose + ref_lose)
        both = -math.log(sigma(z)) - 0.2 * math.log(sigma(z + 2 * score))
        terms.append(weight * (both - 0.1 * win / length))
    torch.testing.assert_close(found.loss.item(), sum(terms) / 7, rtol=1e-10, atol=1e-12)
    assert {"loss/sigmoid", "loss/short", "loss/syntax_aware"} <= found.metrics.keys()
    weighted = [(1.0, "sigmoid"), (0.1, "short"), (0.2, "syntax_aware")]
    torch.testing.assert_close(sum(w * found.metrics[f"loss/{name}"] for w, name in weighted), found.loss)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda s: s.chosen.mean(), r"shape \(\); return a tensor of shape \(7,\)"),
        (lambda s: 1.0, "a loss a float"),
        (lambda s: s.chosen.detach(), "without a gradient"),
        (lambda s: s.chosen / 0, "not finite"),
    ],
)
def test_what_a_custom_loss_must_not_return_is_an_error_with_its_name(function, said, make_pairs):
    config = PreferenceLossConfig("mine:wrong@python")
    with given({"mine:wrong@python": function}), pytest.raises(ValueError, match=f"mine:wrong.*{said}"):
        preference_loss(make_pairs(), config)


def test_ranges_of_rewards_are_over_the_pairs_and_a_tie_is_no_win():
    win, lose, ref = torch.tensor([[-1.0, -6.0], [-4.0, -5.0], [-2.0, -5.0]])
    inputs = PreferenceInputs(win, lose, torch.ones(2), torch.ones(2), ref, ref)
    metrics = preference_loss(inputs, PreferenceLossConfig(beta=0.5)).metrics
    names = [f"{name}_{end}" for name in ("chosen", "rejected", "margins") for end in ("min", "max")]
    ranges = [metrics[f"rewards/{name}"].item() for name in names]
    assert ranges == pytest.approx([-0.5, 0.5, -1.0, 0.0, -0.5, 1.5])
    tied = replace(inputs, rejected_logprobs=inputs.chosen_logprobs)
    assert preference_loss(tied, PreferenceLossConfig()).metrics["rewards/accuracies"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extreme", [0.0, -1e-9, -2e4])
def test_certain_and_impossible_completions_keep_loss_and_gradient_finite(dtype, extreme):
    chosen = torch.tensor([extreme], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-3.0], dtype=dtype, requires_grad=True)
    one = torch.ones(1, dtype=dtype)
    inputs = PreferenceInputs(chosen, rejected, one, one, -one, -one, kl=one[0])
    for name in PREFERENCE_LOSSES:
        loss = preference_loss(inputs, PreferenceLossConfig(name)).loss
        gradients = torch.autograd.grad(loss, (chosen, rejected), allow_unused=True)
        assert loss.isfinite(), name
        assert all(g.isfinite().all() for g in gradients if g is not None), name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loss_type": "dpo"}, "loss_type = 'dpo'"),
        ({"loss_type": "aot"}, "'aot' was removed; use 'sigmoid'"),
        ({"loss_type": ()}, "loss_type"),
        ({"loss_type": ("sigmoid", "kto")}, "kto"),
        ({"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0,)}, "loss_weights"),
        ({"loss_type": ("sigmoid", "simpo")}, "beta"),
        ({"beta": 0.0}, "beta = 0.0"),
        ({"label_smoothing": 0.1}, "label_smoothing = 0.1 is not read by loss_type = 'sigmoid'"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing = 0.5"),
        ({"loss_type": "simpo", "gamma": -1.0}, "gamma = -1.0"),
        ({"loss_type": "kto", "gamma": 1.0}, "gamma = 1.0 is not read"),
        ({"columns": ("a",)}, r"columns = \('a',\) is not read"),
        ({"loss_type": ("kto", "m:f")}, "mixes kto"),
        ({"loss_type": ("m:f", "n:f")}, "each once"),
    ],
)
def test_a_contradictory_configuration_is_refused_with_the_remedy(arguments, said):
    with pytest.raises(ValueError, match=said):
        PreferenceLossConfig(**arguments)


def test_missing_and_misplaced_inputs_are_refused(make_pairs):
    inputs = make_pairs()
    for loss, wrong, named in (
        ("sigmoid", replace(inputs, ref_chosen_logprobs=None), "ref_chosen_logprobs"),
        ("hinge", make_pairs(3, 4), "3 chosen and 4 rejected"),
        ("kto", inputs, "kl is None"),
        ("sft", replace(inputs, margins=torch.ones(7)), "no place for margins"),
    ):
        with pytest.raises(ValueError, match=named):
            preference_loss(wrong, PreferenceLossConfig(loss))
