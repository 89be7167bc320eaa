"""Packed attention against each sequence alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import itertools
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.data.table import CompletionTable
from grpo_fast.policy.architecture import verify_policy
from grpo_fast.policy.attention import flash_obstacle, packed_attention
from grpo_fast.policy.flash import import_problem, installed, newest_flash, package_obstacle, way
from grpo_fast.policy.layout import PackedLayout
from grpo_fast.policy.vision import _runs
from tests.policy.conftest import packed


def of_sizes(*sizes):
    """By group, prompt and completion."""
    rows = [((group,) * prompt, (1,) * completion, group) for group, prompt, completion in sizes]
    return CompletionTable.of(*zip(*rows, strict=True))


def outcome(batch, attention, operands, window, scaling, softcap=None):
    """Output of query, key and value, and the gradients that the last operand makes of theirs."""
    *leaves, gradient = (operand.clone().requires_grad_() for operand in operands)
    options = {"scaling": scaling, "softcap": softcap, "sliding_window": window}
    layout = PackedLayout(batch, attention)
    output, _ = packed_attention(torch.nn.Module(), *leaves, None, packed_layout=layout, **options)
    output.backward(gradient.transpose(1, 2))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("kind", "completion", "pieces"),
    [
        ("sdpa", 10, [(83 + 3 * 10, 0, 4)]),  # the first with its prompt
        ("sdpa", 74, [(73 + 2 * 74, 0, 2), (2 * 74, 73, 2)]),  # pairs of 74 · 221 more are below 2^14, of 75
        ("sdpa", 75, [(73 + 75, 0, 1), (2 * 75, 73, 2), (75, 73, 1)]),  # · 223 above
        ("sdpa", 400, [(73 + 400, 0, 1), (400, 73, 1), (400, 73, 1), (400, 73, 1)]),
        ("flash_attention_2", 10, [(83, 0, 1), (10, 73, 1), (10, 73, 1), (10, 73, 1)]),
    ],
)
def test_completions_share_a_call_while_that_costs_less_than_one_more(kind, completion, pieces):
    (batch,) = packed(of_sizes(*[(group, 73, completion + 1) for group in (3, 4) for _ in range(4)]))
    assert PackedLayout(batch, kind).pieces == 2 * pieces


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right, softcap=math.inf
):
    """Flash-attention, of which a CPU has none: each sequence alone, its last query at its last key."""
    assert right == 0 and max_seqlen_q > 1
    outputs = []
    for (q0, q1), (k0, k1) in zip(cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True):
        assert q1 - q0 <= max_seqlen_q and k1 - k0 <= max_seqlen_k
        past = torch.arange(k1 - k0 - q1 + q0, k1 - k0)[:, None] - torch.arange(k1 - k0)
        seen = (past >= 0) & ((past <= left) | (left < 0))
        keys, values = (part[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qad,kad->aqk", q[q0:q1], keys) * scale
        scores = scores if softcap == math.inf else softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        outputs.append(torch.einsum("aqk,kad->qad", weights, values))
    return torch.cat(outputs)


def torch_operator(*given, scale, window_size_left, window_size_right):
    *operands, dropout, causal, _ = given
    assert (dropout, causal) == (0.0, True)
    return varlen(*operands, scale, window_size_left, window_size_right), None


def torch_public(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    assert enable_gqa
    return varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, *window_size)


def torch_public_without_windows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("it cannot say which keys are seen")


def package_2_or_3(q, k, v, *bounds, softmax_scale=None, causal=False, window_size=(-1, -1), **named):
    return varlen(q, k, v, *bounds, **named, scale=softmax_scale, left=window_size[0], right=1 - causal)


def package_4(q, k, v, qv=None, *, softmax_scale=None, causal=False, window_size=(None, None), **named):
    left = -1 if window_size[0] is None else window_size[0]
    out = varlen(q, k, v, **named, scale=softmax_scale, left=left, right=1 - causal)
    return out, None


WAYS = {
    "flash-attn-4": ("flash_attention_4", "flash_attn.cute", package_4),
    "flash_attn_3": ("flash_attention_3", "flash_attn_interface", package_2_or_3),
    "flash-attn": ("flash_attention_2", "flash_attn", package_2_or_3),
    "public": ("flash_attention_2", "torch.nn.attention.varlen", torch_public),
    "operator": ("flash_attention_2", "torch.nn.attention.varlen", torch_public_without_windows),
}


@pytest.fixture(params=WAYS)
def flash(request, monkeypatch):
    """The name of a flash-attention, of which one way is there and the others are not."""
    name, module, function = WAYS[request.param]
    for reader in ("torch.utils.flop_counter", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(reader)  # which looks at the operator that is replaced below

    def version(distribution):
        if distribution != request.param:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return "9.9"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = SimpleNamespace(flash_attn_varlen_func=function, varlen_attn=function)
    monkeypatch.setitem(sys.modules, module, found)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", torch_operator)
    for known in (way, import_problem):
        known.cache_clear()
    yield name
    for known in (way, import_problem):
        known.cache_clear()


@pytest.mark.parametrize(
    ("window", "longest", "softcap"),
    [(None, 9, None), (1, 9, None), (5, 9, None), (None, 1, None), (4, 9, 1.5)],
)
def test_flash_attention_shares_prompts_exactly(flash, rng, seed, window, longest, softcap):
    """Documents with prompts and completions from a token on, against each document's mask in float64."""
    if softcap and not installed(flash):
        pytest.skip("torch's own has no softcap")
    draw = random.Random(seed)
    lengths = range(1, longest + 1)
    prompts = draw.choices(lengths, k=3)
    drawn = [(g, prompts[g], draw.choice((1, *lengths))) for g in (0, 0, 0, 1, 1, 2)]
    (batch,) = packed(of_sizes(*drawn))
    shapes = [(1, heads, len(batch.input_ids), 8) for heads in (4, 2, 2, 4)]
    operands = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]

    found, sdpa = (outcome(batch, name, operands, window, 0.3, softcap) for name in (flash, "sdpa"))

    tolerance = 1e-4 if softcap else 1e-10  # SDPA with a softcap has float32 scores
    torch.testing.assert_close(found, sdpa, rtol=tolerance, atol=tolerance)


def test_a_model_packed_for_flash_attention_computes_what_it_does_alone(load, flash):
    policy = load("qwen2")
    policy.attention = flash
    verify_policy(policy)


def test_the_newest_flash_attention_that_fits_gpu_and_heads_is_chosen(flash):
    for major, head in itertools.product((8, 9, 10), (64, 128, 192)):
        obstacle = package_obstacle(flash, major, head)
        assert newest_flash(major, head) == (flash if obstacle is None else "flash_attention_2")
    if flash != "flash_attention_2":
        assert "is of compute capabilities 9 to" in str(package_obstacle(flash, 8, 64))
    if flash == "flash_attention_4":
        assert "heads of up to 128 numbers, not 192" in str(package_obstacle(flash, 9, 192))
        assert "not installed" in str(package_obstacle("flash_attention_3", 9, 64))


@pytest.mark.parametrize("flash", ["flash-attn"], indirect=True)
def test_flash_attn_built_for_another_torch_gives_way_to_torchs_own(flash, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # whose import fails

    assert newest_flash(8, 64) == flash and not installed(flash)
    assert "flash-attn does not import" in caplog.text
    assert package_2_or_3 not in getattr(way(flash), "args", ())


def test_the_installed_torch_takes_what_it_is_given():
    schema = torch.ops.aten._flash_attention_forward.default._schema
    operator = [argument.name for argument in schema.arguments]
    given = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    assert operator[:10] == given.split()
    assert {"scale", "window_size_left", "window_size_right"} <= {*operator[10:]}
    public = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    installed_names, names = (list(inspect.signature(one).parameters)[:7] for one in (public, torch_public))
    assert installed_names == names


@pytest.mark.parametrize(
    ("kind", "sizes", "obstacle"),
    [
        ("qwen2", {"hidden_size": 1536, "num_attention_heads": 12}, None),
        ("qwen3", {"head_dim": 256}, None),
        ("qwen3", {"head_dim": 260}, "heads have 260 numbers"),
        ("qwen3", {"head_dim": 12}, "heads have 12 numbers"),
        ("gemma4_text", {"head_dim": 128, "global_head_dim": 256}, None),
        ("gemma4_text", {"head_dim": 256, "global_head_dim": 512}, "heads have 512 numbers"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "caps its scores"),
        ("gpt_oss", {}, "attention sinks"),
        ("deepseek_v3", {}, "values are not as wide"),
    ],
)
def test_what_flash_attention_cannot_compute_is_known_from_the_configuration(kind, sizes, obstacle):
    found = flash_obstacle(AutoConfig.for_model(kind, **sizes))
    assert found == obstacle if obstacle is None else obstacle in str(found)


@pytest.mark.parametrize("softcap", [None, 1e4])
@pytest.mark.parametrize(("queries", "keys", "masked"), [(5, 5, False), (1, 7, False), (4, 6, True)])
def test_a_sink_is_one_more_score_of_no_value(rng, queries, keys, masked, softcap):
    """With its gradient; values are narrower than keys. A high softcap is none."""
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6), (4,), (2, queries, 4, 6))
    *leaves, upstream = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    query, key, value, sinks = (leaf.requires_grad_() for leaf in leaves)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    mask = seen & (torch.rand(queries, keys, generator=rng) > 0.3) if masked else None

    output, _ = packed_attention(torch.nn.Module(), query, key, value, mask, softcap=softcap, s_aux=sinks)

    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    scores = scores.masked_fill(~(seen if mask is None else mask), -torch.inf)
    of_sink = sinks[:, None, None].expand(2, 4, queries, 1)
    weights = torch.cat([scores, of_sink], -1).softmax(-1)[..., :-1]
    right = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    inputs = (query, key, value, sinks)
    found, expected = (torch.autograd.grad(o, inputs, upstream) for o in (output, right))
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if softcap is None else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close((output, *found), (right, *expected), **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 300])
def test_flash_attention_on_a_gpu_is_as_near_to_float32_as_sdpa(rng, window):
    """Longer than two blocks of either kernel; prompts and completions of one token among them."""
    lengths = ((400, (700, 1, 2, 300)), (1, (1, 500)), (129, (128,)))
    drawn = [(group, prompt, own) for group, (prompt, all_own) in enumerate(lengths) for own in all_own]
    (batch,) = (batch.to("cuda") for batch in packed(of_sizes(*drawn)))
    shapes = [(1, heads, len(batch.input_ids), 128) for heads in (4, 2, 2, 4)]
    operands = [torch.randn(shape, generator=rng).cuda().bfloat16() for shape in shapes]

    exact = outcome(batch, "sdpa", [operand.float() for operand in operands], window, 0.1)
    flash, sdpa = (outcome(batch, name, operands, window, 0.1) for name in ("flash_attention_2", "sdpa"))
    for right, one, other in zip(exact, flash, sdpa, strict=True):
        assert (one.float() - right).norm() < 1.2 * (other.float() - right).norm() + 1e-3 * right.norm()


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_every_mask_says_what_visible_says_of_each_pair_of_tokens(windowed, images, seed):
    """Tokens of one of the `images` of a prompt see each other both ways."""
    draw = random.Random(seed)

    def length():
        return draw.choice((1, draw.randint(1, 20), draw.randint(1, 256)))

    for _ in range(6):
        prompts = {group: length() for group in range(draw.randint(1, 4))}
        groups = [group for group in prompts for _ in range(draw.randint(1, 4))]
        (batch,) = packed(of_sizes(*[(group, prompts[group], length()) for group in groups]))
        lengths, total = batch.cu_seqlens.diff().tolist(), len(batch.input_ids)
        at_a_document = max(1, draw.choice(lengths) + draw.choice((-1, 0, 1)))
        window = draw.choice((1, at_a_document, draw.randint(1, 384))) if windowed else None
        of_images = (batch.segment_ids == 0) & (torch.rand(total) < 0.8)
        of_images[batch.cu_seqlens[:-1]] = False
        layout = PackedLayout(batch, "sdpa", _runs(of_images) if images else None)
        index = torch.arange(total)
        visible = layout.visible(index[:, None], index, window)
        neighbours = bool((of_images[1:] & of_images[:-1]).any())
        assert bool(visible.triu(1).any()) == (images and neighbours)

        dense = torch.zeros(total, total, dtype=torch.bool)
        own, seen = layout.own(index, 0), layout.seen(index, 0)
        for rows, columns, mask in zip(own, seen, layout.masks(window), strict=True):
            causal = torch.ones(len(rows), len(columns)).tril().bool()
            dense[rows[:, None], columns] = causal if mask is None else mask
        assert torch.equal(visible, dense)
