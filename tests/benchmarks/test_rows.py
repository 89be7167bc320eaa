"""Rows made to order, and rows sampled from a model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.__main__ import main
from benchmarks.accuracy import consult
from benchmarks.live_tiles import Histogram, count_live, load_histogram
from benchmarks.models import make_policy
from benchmarks.problem import LOSSES, Setting, loss_of
from benchmarks.rows import load_real_rows, make_problem
from grpo_fast.config.policy import ModelConfig

CPU = torch.device("cpu")


def setting(rows: str, tokens: int = 64, vocabulary: int = 4000, hidden: int = 128) -> Setting:
    return Setting(rows, tokens, hidden, vocabulary, "forward_backward", True, "float32")


def test_a_tile_is_live_when_a_probability_in_it_is_above_the_threshold():
    logits = torch.full((2, 300), -30.0)
    logits[0, [5, 299]] = torch.tensor([0.0, -11.0])  # exp(-11) = 1.7e-5
    logits[1, [5, 299]] = torch.tensor([0.0, -12.0])  # exp(-12) = 0.6e-5

    assert count_live(logits).tolist() == [2, 1]


def test_made_rows_have_the_live_tiles_of_the_histogram_and_are_sampled_on_policy_and_not_certain(seed):
    wanted = Histogram("a model", 8000, {4: 5, 18: 3, 40: 2})  # of twice the vocabulary: twice the tiles

    problem = make_problem(setting("histogram", tokens=256), CPU, seed, wanted)

    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    drawn = wanted.draw(256, 4000, torch.Generator().manual_seed(seed))
    found = count_live(hidden @ weight.T)
    assert ((found - drawn).abs() <= 1).float().mean() >= 0.99
    assert float(found.float().mean()) == pytest.approx(float(drawn.float().mean()), rel=0.1)
    p = (hidden @ weight.T).softmax(1)
    surprise = -p.gather(1, problem.targets[:, None]).log().mean()
    entropy = torch.special.entr(p).sum(1).mean()
    assert 0.1 < entropy < 1.5
    assert abs(surprise - entropy) < 0.3


def test_made_rows_thin_out_with_the_threshold_as_a_models_rows_do(seed):
    """Of Qwen2.5-Coder-1.5B's: 3.3 times as many tiles hold a probability above 1e-6 as above 1e-5, 3.3 times
    fewer one above 1e-4, and a tile above 1e-5 holds 1.7 entries above. Independent normal logits of the
    spread that `peaked` has give 8, 9 and 1.05."""
    wanted = Histogram("a model", 64_000, {18: 1})  # of 500 tiles

    problem = make_problem(setting("histogram", 64, 64_000, 256), CPU, seed, wanted)

    p = (problem.hidden @ problem.weight.T).detach().softmax(1).view(64, 500, 128)
    tiles = {threshold: float((p.amax(2) > threshold).float().mean()) for threshold in (1e-4, 1e-5, 1e-6)}
    entries = float((p > 1e-5).sum() / (p.amax(2) > 1e-5).sum())
    assert tiles[1e-5] == pytest.approx(18 / 500, rel=0.05)
    assert 2.2 < tiles[1e-6] / tiles[1e-5] < 5
    assert 2.2 < tiles[1e-5] / tiles[1e-4] < 6
    assert 1.3 < entries < 2.3


def test_an_odd_batch_for_dpo_says_why_it_cannot_be_made():
    with pytest.raises(ValueError, match="15 tokens are odd"):
        make_problem(replace(setting("flat", 15), loss="dpo"), CPU, 0)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_oracle_agrees_with_autograd_in_float64(loss, seed):
    wanted = replace(setting("peaked", vocabulary=900, hidden=48), loss=loss)
    problem = make_problem(wanted, CPU, seed)
    hidden, weight = (t.detach().double().requires_grad_() for t in (problem.hidden, problem.weight))
    expected = (hidden @ weight.T).log_softmax(1).gather(1, problem.targets[:, None]).squeeze(1)
    value = loss_of(problem, expected)
    value.backward()

    oracle = consult(problem)

    torch.testing.assert_close(oracle.logprobs, expected.detach()[oracle.rows], rtol=0, atol=1e-12)
    torch.testing.assert_close(oracle.loss, value.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(oracle.hidden_gradient, hidden.grad[oracle.rows], rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(oracle.weight_gradient, weight.grad[oracle.columns], rtol=1e-9, atol=1e-14)


def test_a_file_that_is_no_histogram_is_named(tmp_path):
    (tmp_path / "tiles.json").write_text("{}")

    with pytest.raises(ValueError, match=r"tiles\.json is no histogram"):
        load_histogram(tmp_path / "tiles.json")


def test_a_models_rows_are_sampled_and_can_be_benchmarked(tmp_path, capsys):
    model, prompts, out, tiles = (tmp_path / name for name in ("m", "p.jsonl", "rows.safetensors", "t.json"))
    make_policy(ModelConfig(path="words", dtype="float32", device="cpu")).save_pretrained(model)
    prompts.write_text("\n".join(json.dumps({"question": f"w{i} w{i + 1}"}) for i in range(5)))
    data = ["--dataset", str(prompts), "--prompt-column", "question", "--count", "3"]
    sampling = ["--max-tokens", "6", "--dtype", "float32"]

    code = main(["rows", "--model", str(model), *data, *sampling, f"--out={out}", f"--histogram={tiles}"])

    rows = load_real_rows(out)
    assert code == 0
    assert 3 <= len(rows.hidden) <= 18
    assert rows.weight.shape == (64, 32)
    assert load_histogram(tiles).rows_by_live_tiles == {1: len(rows.hidden)}
    assert rows.name == load_histogram(tiles).source
    assert "sampled at temperature 1 on 3 prompts" in capsys.readouterr().out
    probabilities = (rows.hidden @ rows.weight.T).softmax(1)
    assert (probabilities.gather(1, rows.targets[:, None]) > 1e-6).all()

    save_file({"hidden": rows.hidden, "target": rows.targets}, out)
    with pytest.raises(ValueError, match="no weight"):
        load_real_rows(out)
