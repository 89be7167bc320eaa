"""Each loss against a transcription of its paper, its gradient against differences, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from grpo_fast.objective.pairs import (
    PREFERENCE_LOSSES,
    PreferenceInputs,
    PreferenceLossConfig,
    PreferenceTotals,
    kto_reference_point,
    preference_loss,
)

PAIRED = sorted(name for name, facts in PREFERENCE_LOSSES.items() if facts.paired)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(mean_logprob: float) -> float:
    p = math.exp(mean_logprob)
    return math.log(p / (1 - p))


def transcription(name: str, i: PreferenceInputs, c: PreferenceLossConfig) -> float:
    """The paper's formula, pair by pair, in Python's own floats."""
    win, lose = i.chosen_logprobs.tolist(), i.rejected_logprobs.tolist()
    ref_win, ref_lose = i.ref_chosen_logprobs.tolist(), i.ref_rejected_logprobs.tolist()
    n_win, n_lose = i.chosen_lengths.tolist(), i.rejected_lengths.tolist()
    eps, beta = c.label_smoothing, c.beta
    ratios = [(w - rw, l - rl) for w, rw, l, rl in zip(win, ref_win, lose, ref_lose, strict=True)]
    h = [a - b for a, b in ratios]
    per_token = [(w / nw, l / nl) for w, nw, l, nl in zip(win, n_win, lose, n_lose, strict=True)]

    def smoothed(z: float) -> float:
        return -(1 - eps) * math.log(sigma(z)) - eps * math.log(sigma(-z))

    def robust(z: float) -> float:
        # (1 − ε) L(chosen ≻ rejected) − ε L(rejected ≻ chosen), over 1 − 2ε
        return ((1 - eps) * -math.log(sigma(z)) - eps * -math.log(sigma(-z))) / (1 - 2 * eps)

    means = [a / nw - b / nl for (a, b), nw, nl in zip(ratios, n_win, n_lose, strict=True)]
    gaps = sorted(w - l for w, l in zip(win, lose, strict=True))
    ref_gaps = sorted(w - l for w, l in zip(ref_win, ref_lose, strict=True))
    wins, losses = sorted(a for a, _ in ratios), sorted(b for _, b in ratios)
    likelihood = -sum(win) / sum(n_win)
    terms = {
        "sigmoid": lambda: [-math.log(sigma(beta * x)) for x in h],
        "cdpo": lambda: [smoothed(beta * x) for x in h],
        "robust": lambda: [robust(beta * x) for x in h],
        "ipo": lambda: [(x - 1 / (2 * beta)) ** 2 for x in means],
        "hinge": lambda: [max(0.0, 1 - beta * x) for x in h],
        "aot": lambda: [smoothed(beta * (p - r)) for p, r in zip(gaps, ref_gaps, strict=True)],
        "aot_unpaired": lambda: [smoothed(beta * (a - b)) for a, b in zip(wins, losses, strict=True)],
        "simpo": lambda: [smoothed(beta * a - beta * b - c.gamma) for a, b in per_token],
        "orpo": lambda: [-a - beta * math.log(sigma(log_odds(a) - log_odds(b))) for a, b in per_token],
        "cpo": lambda: [smoothed(beta * x) + c.cpo_alpha * likelihood for x in gaps],
        "sft": lambda: [likelihood],
    }[name]()
    return sum(terms) / len(terms)


def settings(name: str, **more: float) -> PreferenceLossConfig:
    """The loss with constants that leave no term of it at zero."""
    reads = PREFERENCE_LOSSES[name].fields
    values = {"label_smoothing": 0.2, "gamma": 0.7, "cpo_alpha": 0.3}
    values |= {"desirable_weight": 1.5, "undesirable_weight": 0.5} | more
    return PreferenceLossConfig(
        name, **{key: value for key, value in values.items() if key in reads or key == "beta"}
    )


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("beta", [0.05, 0.4, 3.0])
def test_a_loss_is_its_papers_formula(name, beta, make_pairs):
    inputs, config = make_pairs(), settings(name, beta=beta)
    loss = preference_loss(inputs, config).loss
    torch.testing.assert_close(loss.item(), transcription(name, inputs, config), rtol=1e-10, atol=1e-12)


def test_kto_is_its_papers_formula_for_any_numbers_of_good_and_bad_completions(make_pairs):
    for good, bad in [(5, 3), (0, 4), (4, 0)]:
        inputs = make_pairs(good, bad, kl=torch.tensor(0.8, dtype=torch.float64))
        config = settings("kto", beta=0.3)
        wins = (inputs.chosen_logprobs - inputs.ref_chosen_logprobs).tolist()
        losses = (inputs.rejected_logprobs - inputs.ref_rejected_logprobs).tolist()
        values = [1.5 * (1 - sigma(0.3 * (w - 0.8))) for w in wins]
        values += [0.5 * (1 - sigma(0.3 * (0.8 - l))) for l in losses]
        torch.testing.assert_close(preference_loss(inputs, config).loss.item(), sum(values) / len(values))


def test_ktos_reference_point_is_a_mean_log_ratio_never_below_zero_and_without_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    above = kto_reference_point(logprobs, torch.tensor([-2.0, -4.0]))
    below = kto_reference_point(logprobs, torch.tensor([0.0, 0.0]))
    assert (above.item(), below.item(), above.requires_grad) == (1.5, 0.0, False)


@pytest.mark.parametrize("name", [*PAIRED, "kto"])
def test_gradients_agree_with_finite_differences(name, make_pairs):
    kl = None if name != "kto" else torch.tensor(0.4, dtype=torch.float64)
    inputs, config = make_pairs(kl=kl), settings(name)

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return preference_loss(
            replace(inputs, chosen_logprobs=chosen, rejected_logprobs=rejected), config
        ).loss

    assert torch.autograd.gradcheck(loss, (inputs.chosen_logprobs, inputs.rejected_logprobs))


@pytest.mark.parametrize("name", [*(n for n in PAIRED if not PREFERENCE_LOSSES[n].couples), "kto"])
def test_micro_batches_add_up_to_the_step(name, make_pairs, rng):
    inputs = make_pairs(9)
    changes = {"weights": torch.rand(9 if name != "kto" else 18, generator=rng, dtype=torch.float64)}
    if PREFERENCE_LOSSES[name].takes_margins:
        changes["margins"] = torch.randn(9, generator=rng, dtype=torch.float64)
    if name == "kto":
        changes["kl"] = torch.tensor(0.2, dtype=torch.float64)
    inputs, config = replace(inputs, **changes), settings(name)
    totals = PreferenceTotals(9, 9, int(inputs.chosen_lengths.sum()))

    def part(rows: slice) -> PreferenceInputs:
        own = {
            f.name: value[rows]
            for f in fields(inputs)
            if isinstance(value := getattr(inputs, f.name), torch.Tensor) and value.ndim
        }
        if name == "kto":
            weights = changes["weights"]
            own["weights"] = torch.cat([weights[:9][rows], weights[9:][rows]])
        return replace(inputs, **own, totals=totals)

    whole = preference_loss(inputs, config)
    parts = [preference_loss(part(rows), config) for rows in (slice(0, 2), slice(2, 3), slice(3, 9))]

    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    for metric, value in whole.metrics.items():
        shares = torch.stack([p.metrics[metric] for p in parts])
        combined = {"max": shares.amax, "min": shares.amin}.get(metric[-3:], shares.sum)()
        torch.testing.assert_close(combined, value, msg=metric)


def test_a_margin_shifts_the_gap_that_the_chosen_reward_must_keep_and_has_no_gradient(make_pairs):
    margins = torch.full((7,), 0.5, dtype=torch.float64, requires_grad=True)
    inputs = make_pairs(margins=margins)
    config = PreferenceLossConfig("sigmoid", beta=0.2)

    loss = preference_loss(inputs, config).loss
    loss.backward()

    # ODPO (arXiv 2402.10571): −log σ(β Δ − margin)
    ratio = inputs.chosen_logprobs - inputs.ref_chosen_logprobs
    ratio = ratio - (inputs.rejected_logprobs - inputs.ref_rejected_logprobs)
    expected = -torch.log(torch.sigmoid(0.2 * ratio - 0.5)).mean()
    torch.testing.assert_close(loss, expected)
    assert margins.grad is None


def test_a_sum_of_objectives_is_the_weighted_sum_of_each(make_pairs):
    inputs = make_pairs()
    both = PreferenceLossConfig(("sigmoid", "sft"), loss_weights=(1.0, 0.25), beta=0.3)

    out = preference_loss(inputs, both)

    dpo, sft = (
        preference_loss(inputs, PreferenceLossConfig(name, beta=0.3)).loss for name in ("sigmoid", "sft")
    )
    torch.testing.assert_close(out.loss, dpo + 0.25 * sft)
    torch.testing.assert_close(out.metrics["loss/sft"], sft.detach())


def test_rewards_gap_accuracy_and_ranges_are_reported():
    inputs = PreferenceInputs(
        chosen_logprobs=torch.tensor([-1.0, -6.0]),
        rejected_logprobs=torch.tensor([-4.0, -5.0]),
        chosen_lengths=torch.tensor([2.0, 3.0]),
        rejected_lengths=torch.tensor([2.0, 2.0]),
        ref_chosen_logprobs=torch.tensor([-2.0, -5.0]),
        ref_rejected_logprobs=torch.tensor([-2.0, -5.0]),
    )
    metrics = preference_loss(inputs, PreferenceLossConfig(beta=0.5)).metrics
    found = {name: round(value.item(), 6) for name, value in metrics.items()}
    assert found == {
        "rewards/chosen": 0.0,
        "rewards/rejected": -0.5,
        "rewards/margins": 0.5,
        "rewards/accuracies": 0.5,
        "rewards/chosen_min": -0.5,
        "rewards/chosen_max": 0.5,
        "rewards/rejected_min": -1.0,
        "rewards/rejected_max": 0.0,
        "rewards/margins_min": -0.5,
        "rewards/margins_max": 1.5,
        "logps/chosen": -3.5,
        "logps/rejected": -4.5,
    }


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
        ({"loss_type": ()}, "loss_type"),
        ({"loss_type": ("sigmoid", "kto")}, "kto"),
        ({"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0,)}, "loss_weights"),
        ({"loss_type": ("sigmoid", "simpo")}, "beta"),
        ({"beta": 0.0}, "beta = 0.0 is out of range"),
        ({"beta": -1.0}, "beta = -1.0 is out of range"),
        ({"label_smoothing": 0.1}, "label_smoothing = 0.1 is not read by loss_type = 'sigmoid'"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"must lie in \[0, 0.5\)"),
        ({"loss_type": "simpo", "gamma": -1.0}, "gamma = -1.0 is out of range"),
        ({"loss_type": "kto", "gamma": 1.0}, "gamma = 1.0 is not read"),
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
        ("aot", replace(inputs, margins=torch.ones(7)), "margins were given"),
        ("aot", replace(inputs, weights=torch.ones(7)), "weights were given"),
    ):
        with pytest.raises(ValueError, match=named):
            preference_loss(wrong, PreferenceLossConfig(loss))
