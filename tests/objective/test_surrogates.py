"""Each policy loss against its paper, and each method's whole update, written again for one completion."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.data import table as tables
from grpo_fast.loop.collect import to_train
from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.catalog import CATALOG, DISTILLATION, LOSS_TYPES, METHODS
from grpo_fast.record.logs import Clock

L_MAX = 8  # dr_grpo's constant; the limit of a completion in tokens

# Terms of a completion's tokens t, t.new (C,) log π and t.old log π_old; its advantage a, the constants c.


def ppo(ratio, a, c):
    capped = ratio if c.delta is None else ratio.clamp(max=c.delta)
    return -torch.minimum(capped * a, ratio.clamp(1 - c.epsilon_low, 1 + c.epsilon_high) * a)


def of_token(t, a, c):
    return ppo((t.new - t.old).exp(), a, c)


def of_sequence(t, a, c):
    return ppo((t.new.sum().exp() / t.old.sum().exp()).pow(1 / max(len(t.new), 1)).expand_as(t.new), a, c)


def of_sequence_and_token(t, a, c):
    return ppo((t.new - t.old).mean().detach().exp() * t.new.exp() / t.new.detach().exp(), a, c)


def of_product(t, a, c):
    return ppo((t.new - t.old).exp().prod().expand_as(t.new), a, c)


def gmpo(t, a, c):
    ratio, sign = (t.new - t.old).exp(), math.copysign(1, a)
    clipped = ratio.clamp(math.exp(-c.epsilon_low), math.exp(c.epsilon_high))
    product = torch.minimum(sign * ratio, sign * clipped).abs().prod()
    return -a * product.pow(1 / max(len(ratio), 1)).expand_as(ratio)


def cispo(t, a, c):
    return -(t.new - t.old).exp().clamp(max=c.epsilon_high).detach() * a * t.new


def sapo(t, a, c):
    tau = c.sapo_temperature_pos if a > 0 else c.sapo_temperature_neg
    return -a * 4 / tau / (1 + (-tau * ((t.new - t.old).exp() - 1)).exp())


def vespo(t, a, c):
    k, rate = (c.vespo_k_pos, c.vespo_lambda_pos) if a >= 0 else (c.vespo_k_neg, c.vespo_lambda_neg)
    log_weight = min(max((t.new - t.old).sum().item(), math.log(1e-8)), 20)
    return -math.exp(rate * (1 - math.exp(log_weight)) + k * log_weight) * a * t.new


def reinforce(t, a, c):
    return -a * t.new


def dro(t, a, c):
    return -(a * t.new - c.dro_beta / 2 * (t.new - t.old) ** 2)


def clip_cov(t, a, c):
    return of_token(t, a, c) * ~t.held


def kl_cov(t, a, c):
    return -(t.new - t.old).exp() * a + c.kl_cov_coef * (t.new - t.old).abs() * t.held


def dppo_tv(t, a, c):
    return trust_region(t, a, c, (t.new.exp() - t.old.exp()).abs())


def dppo_kl(t, a, c):
    p, q = t.new.exp(), t.old.exp()
    return trust_region(t, a, c, q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log())


def trust_region(t, a, c, distance):
    away = (t.new - t.old) * a > 0
    kept = ~(away & (distance > (c.epsilon_high if a > 0 else c.epsilon_low)))
    return -(t.new - t.old).exp().clamp(max=c.dppo_ratio_max).detach() * a * t.new * kept


def hold_back(completions, c):
    """Sets t.held: of all tokens, those that Clip-Cov draws, or those of KL-Cov's highest covariance."""
    rows = [(a, *pair) for a, t in completions for pair in zip(t.new.tolist(), t.old.tolist(), strict=True)]
    mean_a, mean_new = fmean(a for a, _, _ in rows), fmean(new for _, new, _ in rows)
    covariances = [(a - mean_a) * (new - mean_new) for a, new, _ in rows]
    if c.loss_type == "kl_cov":
        order, share = sorted(range(len(rows)), key=lambda i: -covariances[i]), c.kl_cov_ratio
    else:
        ratios = [math.exp(new - old) for _, new, old in rows]
        clipped = [
            r > 1 + c.epsilon_high if a > 0 else a < 0 and r < 1 - c.epsilon_low
            for r, (a, _, _) in zip(ratios, rows, strict=True)
        ]
        within = [
            i for i, v in enumerate(covariances) if c.clip_cov_low < v < c.clip_cov_high and not clipped[i]
        ]
        order, share = [within[i] for i in torch.randperm(len(within))], c.clip_cov_ratio
    chosen = set(order[: max(1, int(share * len(rows)))])
    places = iter(range(len(rows)))
    for _, t in completions:
        t.held = torch.tensor([next(places) in chosen for _ in t.new], dtype=torch.bool)


def over_completions(rows):
    return torch.stack([row.sum() / max(len(row), 1) for row in rows]).mean()


def over_tokens(rows):
    return torch.cat(rows).mean()


def sum_of_tokens(rows):
    return torch.stack([row.sum() for row in rows]).mean()


def constant_length(rows):
    return sum_of_tokens(rows) / L_MAX


# The term, what is done with the terms of all completions, and constants away from the defaults, so that a
# constant that is not read shows.
LOSSES = {
    "grpo": (of_token, over_completions, {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 3.0}),
    "bnpo": (of_token, over_tokens, {"epsilon_low": 1.0, "epsilon_high": 0.2}),  # no ratio is as low
    "dr_grpo": (of_token, constant_length, {}),
    "dapo": (of_token, over_tokens, {"epsilon_low": 0.3, "epsilon_high": 0.6}),
    "reinforce_plus_plus_baseline": (of_token, over_tokens, {}),
    "gspo": (of_sequence, over_completions, {"epsilon_low": 0.1, "epsilon_high": 0.4}),
    "gspo_token": (of_sequence_and_token, over_completions, {"epsilon_low": 0.1, "epsilon_high": 0.4}),
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
    "max_rl": (reinforce, sum_of_tokens, {}),
    "dro": (dro, over_tokens, {"dro_beta": 0.7}),
    "clip_cov": (
        clip_cov,
        over_tokens,
        {"clip_cov_ratio": 0.2, "clip_cov_low": 0.05, "clip_cov_high": 2.0, "epsilon_high": 0.4},
    ),
    "kl_cov": (kl_cov, over_tokens, {"kl_cov_ratio": 0.3, "kl_cov_coef": 0.5}),
    "dppo_tv": (dppo_tv, over_tokens, {"epsilon_low": 0.1, "epsilon_high": 0.2, "dppo_ratio_max": 5.0}),
    "dppo_kl": (dppo_kl, over_tokens, {"epsilon_low": 0.02, "epsilon_high": 0.1, "dppo_ratio_max": 5.0}),
}


def config_for(loss_type):
    return GRPOLossConfig(loss_type, max_completion_length=L_MAX, **LOSSES[loss_type][2])


def terms(completions, c):
    if c.loss_type in ("clip_cov", "kl_cov"):
        hold_back(completions, c)
    return [LOSSES[c.loss_type][0](t, a, c) for a, t in completions]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("empty", [False, True], ids=["full", "one empty"])
def test_loss_and_gradient_are_the_papers(loss_type, empty, make_batch, assert_same):
    batch, config = make_batch(empty=empty), config_for(loss_type)
    rows = zip(batch.advantages.tolist(), batch.logprobs, batch.old, batch.mask, strict=True)
    completions = [(a, SimpleNamespace(new=new[mask], old=old[mask])) for a, new, old, mask in rows]

    torch.manual_seed(0)  # clip_cov draws
    expected = LOSSES[loss_type][1](terms(completions, config))
    torch.manual_seed(0)
    found = policy_loss(batch.inputs(), config)

    assert_same(batch, found.loss, expected)
    means = [name.removesuffix("_mean") for name in found.metrics if name.endswith("_mean")]
    cuts = {name.removeprefix("clip_ratio/") for name in means if name.startswith("clip_ratio/")}
    absent = {"delta"} if config.delta is None else set()
    assert cuts - {"region"} == set(CATALOG[loss_type].cuts) - absent
    if "cov" in loss_type:
        held = torch.cat([t.held for _, t in completions]).double().mean()
        torch.testing.assert_close(found.metrics["clip_ratio/covariance_mean"], held)


@pytest.mark.parametrize("loss_type", ["vespo", "dapo"])
def test_the_samplers_ratio_enters_vespos_weight_and_multiplies_others(loss_type, make_batch, assert_same):
    batch, config = make_batch(), config_for(loss_type)
    config = replace(config, sampler_correction="token_truncate", sampler_clip_max=1.1)
    weights = (batch.old - batch.sampler).exp().clamp(max=1.1)
    old = batch.old - weights.log() if loss_type == "vespo" else batch.old
    rows = zip(batch.advantages.tolist(), batch.logprobs, old, batch.mask, strict=True)
    expected = terms(
        [(a, SimpleNamespace(new=new[mask], old=old[mask])) for a, new, old, mask in rows], config
    )
    if loss_type != "vespo":
        expected = [
            row * weight[mask] for row, weight, mask in zip(expected, weights, batch.mask, strict=True)
        ]

    assert_same(batch, policy_loss(batch.inputs(), config).loss, over_tokens(expected))


def test_vespo_bounds_each_tokens_log_ratio_by_20_before_it_adds_them_up():
    logprobs = torch.full((8,), -1.0, dtype=torch.float64, requires_grad=True)
    log_ratio = torch.tensor([-20, 18, -21, 18, 20, -19, 21, -19]).double()  # of pairs of tokens
    ones, old = torch.ones_like(log_ratio), logprobs.detach() - log_ratio
    inputs = LossInputs(logprobs, ones, torch.arange(8) // 2, ones.bool(), 4, old_logprobs=old)
    config = GRPOLossConfig("vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0)

    (gradient,) = torch.autograd.grad(policy_loss(inputs, config).loss, logprobs)

    weights = [math.exp(3 * (1 - math.exp(w)) + 2 * w) for w in (-2, -2, 1, 1)]
    torch.testing.assert_close(-8 * gradient, torch.tensor(weights).double().repeat_interleave(2))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ratios_beyond_the_range_of_floats_leave_no_nan_in_bounded_losses(loss_type):
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


# -------------------------------------------------------------------------------------- whole updates
# Rewards and lengths in, gradient out, each method with the numbers of its paper or its authors' recipe.

Rows = list[list[float]]  # (G, n): a number of each completion


def centred(rewards, *_):
    return [[r - fmean(group) for r in group] for group in rewards]


def leave_one_out(rewards, *_):
    return [[r - (sum(group) - r) / (len(group) - 1) for r in group] for group in rewards]


def by_group(rewards, *_):
    rows = zip(centred(rewards), rewards, strict=True)
    return [[a / (stdev(group) + 1e-4) for a in row] for row, group in rows]


def by_mean(rewards, *_):
    rows = zip(centred(rewards), rewards, strict=True)
    return [[a / (fmean(group) + 1e-4) for a in row] for row, group in rows]


def by_batch(rewards, *_):
    return [[a / (stdev(flat(rewards)) + 1e-4) for a in row] for row in centred(rewards)]


def whitened(rewards, lengths, *_):
    pairs = zip(flat(centred(rewards)), flat(lengths), strict=True)
    tokens = [a for a, length in pairs for _ in range(int(length))]
    return [[(a - fmean(tokens)) / math.hypot(stdev(tokens), 1e-4) for a in row] for row in centred(rewards)]


def gpg(rewards, *_):
    live = sum(len(set(group)) > 1 for group in rewards)
    return [[a * len(rewards) / live for a in row] for row in centred(rewards)]


def gdpo(_, __, first, second):
    pairs = zip(flat(by_group(first)), flat(by_group(second)), strict=True)
    summed = [2 * a - b / 2 for a, b in pairs]
    return by_three([a / (stdev(summed) + 1e-4) for a in summed])


def flat(rows):
    return [value for row in rows for value in row]


def by_three(values):
    return [values[i : i + 3] for i in range(0, len(values), 3)]


def k2(t):
    return (t.new - t.ref) ** 2 / 2


def k3(t):
    return (t.ref - t.new).exp() - 1 - (t.ref - t.new)


def entropy(t):
    return t.entropy


def clip(low, high, **more):
    return {"epsilon_low": low, "epsilon_high": high, **more}


# The surrogate's loss_type, advantages, constants, and other terms with their coefficients.
DPPO = {"dppo_ratio_max": 1e4, "aggregation": constant_length}
PAPERS = {
    "grpo": ("grpo", by_group, clip(0.2, 0.2), (0.04, k3)),
    "bnpo": ("bnpo", by_group, clip(0.2, 0.2)),
    "dr_grpo": ("dr_grpo", centred, clip(0.2, 0.2)),
    "dapo": ("dapo", by_group, clip(0.2, 0.28)),
    "gspo": ("gspo", by_group, clip(3e-4, 4e-4)),
    "gspo_token": ("gspo_token", by_group, clip(3e-4, 4e-4)),
    "luspo": ("luspo", by_group, clip(2e-3, 2.5e-3)),
    "rloo": ("rloo", leave_one_out, clip(0.2, 0.2)),
    "reinforce_plus_plus_baseline": ("dapo", whitened, clip(0.2, 0.2), (1e-5, k2)),
    "gmpo": ("gmpo", by_group, clip(0.4, 0.4)),
    "cispo": ("cispo", by_group, {"epsilon_high": 5.0}),
    "sapo": ("sapo", by_group, {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
    "vespo": (
        "vespo",
        by_group,
        {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    ),
    "gpg": ("gpg", gpg, {}),
    "reinforce": ("reinforce", leave_one_out, {}),
    "max_rl": ("max_rl", by_mean, {}),
    "dro": ("dro", centred, {"dro_beta": 0.05}),
    "clip_cov": (
        "clip_cov",
        by_group,
        clip(1.0, 1.0, clip_cov_ratio=2e-4, clip_cov_low=1.0, clip_cov_high=5.0),
    ),
    "kl_cov": ("kl_cov", by_group, {"kl_cov_ratio": 2e-3, "kl_cov_coef": 1.0}),
    "dppo_tv": ("dppo_tv", centred, clip(0.15, 0.15, **DPPO)),
    "dppo_kl": ("dppo_kl", centred, clip(0.05, 0.05, **DPPO)),
    "lite_ppo": ("dapo", by_batch, clip(0.2, 0.2)),
    "gdpo": ("dapo", gdpo, clip(0.2, 0.2)),
    "intellect_2": ("dapo", by_group, clip(0.2, 0.2, delta=4.0), (0.001, k3), (-0.001, entropy)),
    "skywork_or1": ("dapo", by_group, clip(0.2, 0.2), (-1e-4, entropy)),
}
# tests/loop/test_distillation.py has the others.
OF_ADVANTAGES = [name for name, keys in METHODS.items() if keys.get("loss.loss_type") not in DISTILLATION]
DRAWN_AGAIN = ("dapo", "cispo", "reinforce_plus_plus_baseline", "clip_cov", "kl_cov", "intellect_2")


@pytest.mark.parametrize("method", OF_ADVANTAGES)
def test_a_methods_whole_update_is_its_papers(method, make_trainer, assert_same, monkeypatch, toy, rng):
    loss_type, estimator, constants, *others = PAPERS[method]
    second = 0.5 if method == "max_rl" else -0.5  # the weight of the second reward; max_rl takes none below 0
    lengths = torch.randint(1, L_MAX + 1, (15,), generator=rng).tolist()
    ids = torch.arange(sum(lengths)).split(lengths)

    def random(low, high):  # few digits, so that float32 holds them
        return torch.randint(int(64 * low), int(64 * high), (sum(lengths),), generator=rng).double() / 64

    old, ref, nats = random(-4, -0.5), random(-4, -0.5), random(0, 3)
    new = old + random(-0.4, 0.4) + torch.arange(len(old)) / 2**16  # no two alike, of which one is held back
    old[0], new[0] = -4, -0.5  # a ratio of 33 in the completion that earns least
    tokens = SimpleNamespace(new=new.requires_grad_(), old=old, ref=ref, entropy=nats)
    table = torch.randint(0, 8, (5, 3, 2), generator=rng).double() / 4
    table[:, :2] = torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    table[2] = 0.5  # the one flat group
    weighted = table @ torch.tensor([2.0, second], dtype=torch.float64)

    totals = flat(weighted.tolist())
    if method in ("dapo", "cispo"):  # the last fifth of the limit, in whole tokens, is punished softly
        totals = [r - max(0, n - 6) / 2 for r, n in zip(totals, lengths, strict=True)]
    if method == "rloo":
        totals = [r - 0.03 * (old - ref)[own].sum().item() for r, own in zip(totals, ids, strict=True)]
    drawn = [i for i in range(15) if i // 3 != 2 or method not in DRAWN_AGAIN]
    columns = (totals, lengths, *(flat(table[..., k].tolist()) for k in (0, 1)))
    advantages = flat(estimator(*(by_three([column[i] for i in drawn]) for column in columns)))
    own = [SimpleNamespace(**{name: v[ids[i]] for name, v in vars(tokens).items()}) for i in drawn]
    completions = list(zip(advantages, own, strict=True))
    torch.manual_seed(0)  # clip_cov draws
    rows = terms(completions, SimpleNamespace(**{"loss_type": loss_type, "delta": None} | constants))
    for i, t in enumerate(own):
        if method != "skywork_or1" or drawn[i] // 3 != 2:  # whose batch has no flat group
            rows[i] = rows[i] + sum(coefficient * of(t) for coefficient, of in others)
    expected = constants.get("aggregation", LOSSES[loss_type][1])(rows)

    rewards = [toy["rewards"][0] | {"weight": 2.0}, {"reward": "tag_format", "weight": second}]
    trainer = make_trainer(method=method, rewards=rewards)
    drawn_once = tables.CompletionTable.of(
        [(1,)] * 15,
        [own.tolist() for own in ids],
        [i // 3 for i in range(15)],
        facts={
            "reward": weighted.flatten(),
            "reward_table": table.flatten(0, 1),
            "truncated": torch.zeros(15, dtype=torch.bool),
            "episode": torch.full((15, 5), torch.nan),
        },
    )

    def logprobs_of(policy, batch, *_):
        return SimpleNamespace(logprob=(old if policy is trainer.policy else ref)[batch.targets].float())

    monkeypatch.setattr(trainer, "rollout", lambda *_: drawn_once)
    monkeypatch.setattr(trainer.update.annotator, "head_outputs", logprobs_of)
    trainer.update.entropy_controller.update(0.1)  # below its target: then it acts
    monkeypatch.setattr(trainer.prompts, "next", lambda: [Prompt(g, "?", (1,), {}) for g in range(5)])
    samples, step = to_train(trainer.collect(Clock())[0], trainer.config.advantage, trainer.config.loss)
    targets = samples.token_ids
    inputs = LossInputs(
        tokens.new[targets],
        samples.columns["advantages"].double(),
        samples.spread(torch.arange(len(samples))),
        torch.ones_like(targets, dtype=torch.bool),
        len(samples),
        **{"old_logprobs": old[targets], "ref_logprobs": ref[targets], "entropy": nats[targets]},
        totals=step,
    )
    torch.manual_seed(0)
    found = policy_loss(inputs, trainer.update.loss, trainer.update.entropy_coef).loss
    assert_same(tokens, found, expected, rtol=1e-6)
