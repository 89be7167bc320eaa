"""The toy of `tolerance_training` and `sampler_mismatch`: its answers, and what is trained on it and how."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor

from benchmarks import sampler_mismatch
from benchmarks import tolerance_training as training
from benchmarks.readme import render
from benchmarks.step import LOSS
from benchmarks.tolerance_training import ARROW, END, STRIDE
from grpo_fast import linear_logprob
from grpo_fast.policy import Policy
from grpo_fast.table import Completions


@pytest.fixture(scope="module")
def toy() -> Policy:
    """Peaked enough that something can be left out."""
    policy = training.make_toy(seed=random.randrange(1 << 30))
    with torch.no_grad():
        policy.base_model.model.norm.weight.mul_(40)
    return policy


def test_the_answer_is_the_sorted_digits_and_the_end():
    prompt = (*(STRIDE * digit for digit in (3, 1, 4, 1, 5)), ARROW)

    assert training.answer(prompt) == (*(STRIDE * digit for digit in (1, 1, 3, 4, 5)), END)
    drawn = training.draw_prompt(random.Random(0))
    assert drawn[-1] == ARROW and all(symbol % STRIDE == 0 for symbol in drawn)


def test_the_exact_head_has_the_gradient_of_full_logits_and_a_drawn_one_nearly(toy, seed):
    chance = random.Random(seed)  # not sampled: a group of equal completions would have no gradient
    prompts = [training.draw_prompt(chance) for _ in range(16)]
    samples = Completions.of(prompts, [chance.choices(range(2048), k=6) for _ in prompts])
    samples = samples.with_columns(
        advantages=samples.spread(torch.tensor([chance.random() for _ in prompts]))
    )

    def gradient(tolerance: float | None) -> Tensor:
        trained = [p for p in toy.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(training.loss_of(tolerance, toy, samples), trained)
        return torch.cat([g.flatten() for g in found])

    full, exact, drawn = map(gradient, (None, 0.0, 2.0))

    assert (exact - full).norm() <= 1e-4 * full.norm()
    assert 0 < (drawn - exact).norm() <= 0.1 * full.norm()


def test_what_is_dropped_is_not_made_up_for(seed):
    random_numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randn(32, 1, 32, generator=random_numbers)  # in some, nothing is drawn
    weight = torch.randn(2048, 32, generator=random_numbers)

    def gradients(tolerance: float) -> Tensor:
        """Of the weight, by each token alone."""
        found = []
        for hidden in tokens:
            leaf = weight.clone().requires_grad_()
            linear_logprob(hidden, leaf, torch.zeros(1).long(), tolerance=tolerance).logprob.sum().backward()
            found.append(leaf.grad)
        return torch.stack(found)

    exact, drawn = gradients(0), gradients(100)
    with training.dropping():
        dropped = gradients(100)

    kept = dropped != 0
    assert kept[:, :128].any() and not kept.all()
    torch.testing.assert_close(dropped, exact.where(kept, 0))
    assert (drawn.abs() > 1.01 * exact.abs()).any() and torch.equal(gradients(100), drawn)  # as before


def test_a_training_run_follows_from_its_seed(monkeypatch):
    monkeypatch.setattr(training, "PROMPTS", 2)
    monkeypatch.setattr(training, "QUESTIONS", 2)
    monkeypatch.setattr(training, "reward", lambda _, completion: float(completion.token_ids[0] % 2))
    start = training.make_toy(seed=0)

    first, again, other = (training.train_toy(start, 0.0, 2, seed) for seed in (5, 5, 6))

    assert first == again != other
    assert first["moved_mean"] > 0


def test_rounded_weights_have_few_values_in_a_row_and_are_far_from_the_policy(seed, monkeypatch):
    monkeypatch.setattr(training, "PROMPTS", 2)
    policy = training.make_toy(seed)
    sampler = sampler_mismatch.rounded(copy.deepcopy(policy), policy, 3)
    exact, few = (one.model.get_input_embeddings().weight for one in (policy, sampler))
    assert max(len(row.unique()) for row in few) <= 7
    assert ((exact - few).abs() <= exact.abs().amax(1, keepdim=True) / 6 * 1.001).all()

    by_bits = [sampler_mismatch.train(policy, LOSS, bits, 1, seed)["kl"] for bits in (None, 3)]
    assert by_bits[0] < 1e-6 < 1e-5 < by_bits[1]


def test_the_summaries_are_over_seeds():
    ended = {"task": "toy", "moved_mean": 2.0, "rewards": [0.25, 0.75]}
    scores = {"exact": {1: 0.5, 0: 0.7}, "drawn": {0: 0.6, 1: 0.7}}
    trained = [
        ended | {"variant": variant, "seed": seed, "after": value}
        for variant, by_seed in scores.items()
        for seed, value in by_seed.items()
    ]
    trained.append(trained[-1] | {"rewards": [1.0], "after": 1.0})  # of other steps
    known = dict.fromkeys(sampler_mismatch.METRICS, 1.0)
    runs = [known | {"bits": 3, "correction": c, "score": s} for c, s in (("a", 0.2), ("b", 1), ("a", 0.4))]
    arms = [(arm["correction"], arm["score"], arm["error"]) for arm in sampler_mismatch.summary(runs)]

    other, exact, drawn = training.summary(trained)  # fewest steps first
    assert (exact["seeds"], exact["score"], exact["reward"], exact["moved"]) == (2, 0.6, 0.5, 2.0)
    assert (drawn["score_apart"], drawn["score_error"]) == (pytest.approx(0.05), pytest.approx(0.15))
    assert (other["steps"], other["score_apart"], other["score_error"]) == (1, None, None)
    assert arms[0] == ("a", pytest.approx(0.3), pytest.approx(0.1)) and arms[1][:2] == ("b", 1)


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    made = []

    def train(task: str, tolerance: float | None, steps: int, seed: int, before: float | None) -> dict:
        made.append((task, tolerance, steps, seed, before))
        return {"before": 0.25, "after": 0.5 + seed / 4, "moved_mean": 1.0, "rewards": [0.5] * steps}

    monkeypatch.setattr(training, "train", train)
    options = ["--json", str(tmp_path / "record.json"), "--tasks", training.TRAINED, "--tolerance", "2"]
    options += ["--chart", str(tmp_path / "curves.svg")]

    assert training.main([*options, "--seeds", "0"]) == 0
    assert training.main([*options, "--seeds", "0", "1"]) == 0

    assert [run[1:] for run in made[:2]] == [(0.0, 12, 0, None), (2.0, 12, 0, 0.25)]
    assert [run[3] for run in made] == [0] * 4 + [1] * 4
    shown = render(tmp_path / "record.json", "the link").splitlines()
    assert shown[3].startswith("| quickstart, head trained | 12 | drawn, 2 | 2 | 0.625 | +0.000 ± 0.000 |")
    assert "drawn, 2" in (tmp_path / "curves.svg").read_text()
