"""What drawing, dropping and filtering cost beside rounding, on made rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import pad

from benchmarks.__main__ import main
from benchmarks.bias import (
    DRAWN,
    DROPPED,
    ERRORS,
    FILTERED,
    ROUNDED,
    SEQUENCE,
    Batch,
    compare,
    drawn,
    equal_lengths,
    exactly,
    filtered,
)
from benchmarks.readme import render
from benchmarks.rows import RealRows
from grpo_fast.head import reference
from grpo_fast.head.call import RowGradients, RowStatistics, Wanted
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import DEFAULT_TOLERANCE, Chunks
from tests.head.selection import sampled_backward

VOCABULARY, HIDDEN = 1500, 24


@pytest.fixture
def rows(rng) -> RealRows:
    """Of which about every second tile matters."""
    hidden, weight = torch.randn(80, HIDDEN, generator=rng), torch.randn(VOCABULARY, HIDDEN, generator=rng)
    return RealRows("made", hidden, torch.zeros(80, dtype=torch.int64), weight)


def test_the_command_shows_dropping_grow_with_tokens_and_drawing_stay(tmp_path, rows, capsys):
    given, found = tmp_path / "rows.safetensors", tmp_path / "bias.json"
    tensors = {"hidden": rows.hidden, "target": rows.targets, "weight": rows.weight}
    save_file(tensors, given, {"source": "made"})
    sizes = ["--tokens", "64", "768", "--batches", "3", "2", "1", "--tolerance", "8", "--sweep", "768"]
    sizes += ["--lengths", "1,200", "--draws", "30"]
    assert main(["bias", "--rows", str(given), *sizes, "--json", str(found)]) == 0

    (of_model,) = json.loads(found.read_text())["bias"]
    behind = {(c["tokens"], c["mean"], c["variant"], c["tolerance"]): c["behind"] for c in of_model["cells"]}
    of = {
        tokens: {name: behind[tokens, SEQUENCE, name, 8.0] for name in (DRAWN, DROPPED)}
        for tokens in (64, 768)
    }
    assert of[768][DROPPED] > 1.5 * of[64][DROPPED]
    assert of[768][DRAWN] < 1.5 * of[64][DRAWN]
    assert of[768][DRAWN] < 0.7 * of[768][DROPPED]
    assert behind[768, SEQUENCE, DRAWN, DEFAULT_TOLERANCE] < of[768][DRAWN]
    assert {c["mean"] for c in of_model["cells"] if c["lengths"] == [1, 200]} == {SEQUENCE, "token"}
    assert {c["variant"] for c in of_model["cells"]} == {ROUNDED, DRAWN, DROPPED, FILTERED}
    for name in ERRORS:  # 1 and a spread of 0.05 to 0.15; were they dropped, 30
        assert 0.4 < of_model["draws"]["ratio"][name] < 1.8
    assert "± " in render(found, "link") and "made" in render(found, "link")


def test_the_exact_gradients_and_the_drawn_ones_are_those_of_the_head(rows, seed):
    batch = Batch.draw(rows, equal_lengths(256), SEQUENCE, seed)
    exact = exactly(batch)

    empty = torch.empty(0)
    statistics = RowStatistics(batch.rows.logprob, batch.rows.logsumexp, *5 * [empty])
    certificate = Certificate.pending(torch.device("cpu"))
    given = batch.problem, statistics, RowGradients(-batch.rows.mass), Wanted(True, True, False), certificate
    expected = reference.backward(*given, Chunks(64, 256))
    torch.testing.assert_close(exact.hidden, expected.hidden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(exact.weight, expected.weight, rtol=1e-4, atol=1e-6)
    gradient = batch.rows.of_products(batch.problem, slice(0, VOCABULARY))
    error = gradient.bfloat16().float() - gradient
    of_hidden = (error @ rows.weight).square().sum() / exact.squares[0]
    of_weight = (error.T @ batch.problem.hidden).square().sum() / exact.squares[1]
    torch.testing.assert_close(exact.rounded[:2], torch.stack([of_hidden, of_weight]), rtol=1e-2, atol=0)

    selection, pairs = drawn(batch, 2.0, batch.salt)
    numbers = compare(batch, exact, selection, pairs)
    found = sampled_backward(batch.problem._replace(tolerance=2.0), *given[1:], Chunks(64, 256))
    relative = (found.hidden - exact.hidden).square().sum() / exact.squares[0]
    assert float(numbers[0]) == pytest.approx(float(relative), rel=1e-3)
    assert float(numbers[5]) == pytest.approx(float(certificate.hidden_error), rel=1e-4)


def test_the_filter_leaves_out_blocks_whose_every_entry_is_small(rows, seed):
    hidden = rows.hidden.clone()
    hidden[:, 0] = 8  # some words are unlikely everywhere
    batch = Batch.draw(replace(rows, hidden=hidden), equal_lengths(256), SEQUENCE, seed)

    selection, _, words = filtered(batch)

    logits = batch.problem.hidden @ rows.weight.T
    assert (logits.mean(0)[words].diff() > -1e-4).all()
    size = logits.softmax(1)
    size[torch.arange(256), batch.problem.targets] -= 1
    blocks = pad(size.abs()[:, words], (0, -VOCABULARY % 128)).unfold(0, 128, 128).unfold(1, 128, 128)
    expected = (blocks.amax((2, 3)) >= 2**-12).float().repeat_interleave(128, 0)
    torch.testing.assert_close(selection.scale, expected)
    assert 0 < float(expected.mean()) < 1
