from __future__ import annotations

import gc
import json
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from grpo_fast.config.policy import OptimizerConfig
from grpo_fast.policy import PolicyOptimizer, host_memory
from grpo_fast.policy import optimizer as optimizers
from grpo_fast.policy.optimizer import Diverged

CONFIG = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, schedule="cosine", warmup_steps=2
)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
kinds = pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
WIDTH = 768  # of a layer of 4,608 numbers, enough for moments of 8 bits


@pytest.fixture(autouse=True)
def uncompiled():
    """Do not let torchao compile its step for each shape, which takes a CPU ten seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(dtype, config=CONFIG, steps=10, device="cpu", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).to(device, dtype)
    return model, PolicyOptimizer(dict(model.named_parameters()), config, total_steps=steps, **options)


def one_weight(values, steps=100, **config):
    weight = nn.Parameter(values)
    options = OptimizerConfig(**{"max_grad_norm": None, **config})
    return weight, PolicyOptimizer({"weight": weight}, options, total_steps=steps)


def backward(model, rng):
    weight = next(model.parameters())
    model(torch.randn(5, 6, generator=rng).to(weight)).float().square().mean().backward()


def train(model, optimizer, rng, steps):
    """The norms of the gradients of some steps."""
    norms = []
    for _ in range(steps):
        backward(model, rng)
        norms.append(optimizer.step())
        optimizer.advance()
    return norms


def repeated(rng, *runs):
    """What the runs return, all on the same random numbers."""
    before, results = rng.get_state(), []
    for run in runs:
        rng.set_state(before)
        results.append(run())
    return results


def same(first, second):
    return all(map(torch.equal, first.parameters(), second.parameters()))


def load_into(optimizer, saved):
    def read(tensors):
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])

    optimizer.load_state_tensors(saved, read)


@kinds
@both_dtypes
@pytest.mark.parametrize("rounded", [False, True])
def test_a_resumed_optimizer_continues_to_the_bit(rng, dtype, kind, rounded):
    config = CONFIG.model_copy(update={"kind": kind, "stochastic_rounding": rounded})
    model, optimizer = build(dtype, config)
    train(model, optimizer, rng, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    resumed_model, resumed = build(dtype, config)
    load_into(resumed, saved)
    resumed.load_state(json.loads(json.dumps(optimizer.state())))

    def go_on(*pair):
        torch.manual_seed(1)  # of rounding
        return train(*pair, rng, 3)

    expected, norms = repeated(rng, partial(go_on, model, optimizer), partial(go_on, resumed_model, resumed))

    assert norms == expected and resumed.learning_rate == optimizer.learning_rate
    assert same(model, resumed_model)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name


@both_dtypes
@kinds
@pytest.mark.parametrize("states", [("optimizer",), ("optimizer", "master")])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_state_on_the_host_takes_the_same_steps_and_stays_there(
    rng, monkeypatch, dtype, kind, states, device
):
    config = CONFIG.model_copy(update={"kind": kind})
    whole = kind == "adamw" and states == ("optimizer", "master")
    away = CONFIG.model_copy(update={"kind": "adamw_offload"}) if whole else config
    host_like, hosts = host_memory.host_like, set()

    def noted(tensor, **options):
        made = host_like(tensor, **options)
        hosts.add(made.data_ptr())
        return made

    monkeypatch.setattr(optimizers, "SMALLEST", 4 * WIDTH + 1)  # the biases stay
    monkeypatch.setattr(host_memory, "host_like", noted)
    (plain, stays), (later, moves) = (build(dtype, config, device=device) for _ in range(2))
    model, goes = build(dtype, away, device=device, on_host=() if whole else states)
    masters_there = {"master" in states} if dtype == torch.bfloat16 else set()
    pairs = (plain, stays), (model, goes), (later, moves)

    for steps in (1, 2, 2):
        expected, *found = repeated(rng, *(partial(train, *pair, rng, steps) for pair in pairs))
        matrices = (t for name, t in goes.moments().items() if name.endswith("weight") and t.ndim)
        assert {tensor.data_ptr() in hosts for tensor in matrices} == {True}
        assert {t.data_ptr() in hosts for t in goes.masters().values() if t.ndim == 2} == masters_there
        assert found == [expected] * 2
        assert same(plain, model) and same(plain, later)
        for state in states:
            moves.keep_on_host(state)
    for name, tensor in stays.state_tensors().items():
        for other in (goes, moves):
            assert torch.equal(tensor.cpu(), other.state_tensors()[name].cpu())
    load_into(goes, stays.state_tensors())
    assert repeated(rng, partial(train, model, goes, rng, 2), partial(train, plain, stays, rng, 2))
    assert same(plain, model)


def test_an_optimizer_that_nobody_needs_any_more_is_forgotten(rng):
    model, optimizer = build(torch.bfloat16)
    train(model, optimizer, rng, 1)
    parameter, optimizer = weakref.ref(next(model.parameters())), weakref.ref(optimizer)
    del model
    gc.collect()
    assert parameter() is None and optimizer() is None


@both_dtypes
def test_after_a_reset_the_optimizer_goes_on_as_a_fresh_one(rng, dtype):
    other = OptimizerConfig(learning_rate=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    model, optimizer = build(dtype)
    train(model, optimizer, rng, 3)
    fresh_model, fresh = build(dtype, other, steps=4)
    load_into(fresh, {k: v.clone() for k, v in optimizer.state_tensors().items() if "master." in k})

    optimizer.configure(other, total_steps=4)
    optimizer.reset_state()
    runs = (partial(train, *pair, rng, 4) for pair in ((model, optimizer), (fresh_model, fresh)))
    norms, fresh_norms = repeated(rng, *runs)

    assert norms == fresh_norms
    assert optimizer.learning_rate == fresh.learning_rate
    assert same(model, fresh_model)


@kinds
def test_float32_follows_adamw_with_clipping_and_no_decay_of_vectors(rng, kind):
    config = OptimizerConfig(kind=kind, learning_rate=1e-2, weight_decay=0.3, max_grad_norm=0.2, eps=1e-3)
    (model, optimizer), (twin, _) = build(torch.float32, config), build(torch.float32, config)
    groups = [
        {"params": [p for p in twin.parameters() if (p.ndim > 1) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.3), (False, 0.0))
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=1e-3)

    def reference():
        for _ in range(4):
            backward(twin, rng)
            yield float(nn.utils.clip_grad_norm_(twin.parameters(), 0.2))
            plain.step()
            plain.zero_grad()

    norms, expected = repeated(rng, partial(train, model, optimizer, rng, 4), lambda: [*reference()])

    close = {"rtol": 1e-5, "atol": 1e-6} if kind == "adamw" else {"rtol": 0, "atol": 2e-3}
    assert norms == pytest.approx(expected, rel=close["atol"]) and max(norms) > 0.2
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, **close)


def test_an_optimizer_of_another_kind_takes_up_the_state(rng):
    kinds, saved = ("adamw", "adamw_8bit", "adamw_offload", "adamw_8bit"), [{}]
    for kind in kinds:
        model, optimizer = build(torch.bfloat16, CONFIG.model_copy(update={"kind": kind}))
        load_into(optimizer, saved[-1] or optimizer.state_tensors())
        if not saved[-1]:
            train(model, optimizer, rng, 3)
        saved.append({name: tensor.clone() for name, tensor in optimizer.state_tensors().items()})

    _, whole, narrow, *others = saved
    for name, tensor in narrow.items():
        scale = tensor.abs().max() if name.startswith("exp_avg") else 0.0
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=0.01 * scale, msg=name)
        assert all(tensor.equal(other[name]) for other in others), name
    assert not whole["exp_avg.0.weight"].equal(narrow["exp_avg.0.weight"])


@pytest.mark.parametrize("rounded", [False, True])
def test_masters_and_stochastic_rounding_keep_updates_below_bfloat16(rounded):
    options = {"learning_rate": 1e-4, "stochastic_rounding": rounded}
    weight, optimizer = one_weight(torch.ones(64, 64, dtype=torch.bfloat16), **options)

    for _ in range(50):  # each moves the weight by 1e-4, a fortieth of a bf16 step at 1
        weight.sum().backward()
        optimizer.step()

    assert weight.float().mean().item() == pytest.approx(1 - 50e-4, abs=5e-4 if rounded else 2**-9)
    assert weight[0, 0] < 1 or rounded
    assert [m.nbytes for m in optimizer.masters().values()] == [4 * 64 * 64] * (not rounded)


def test_gradients_of_micro_batches_add_up_in_float32():
    weight, optimizer = one_weight(torch.zeros(1, dtype=torch.bfloat16))

    (weight * 256.0).sum().backward()
    for _ in range(8):  # in bf16, 256 + 1 is 256
        weight.sum().backward()

    assert weight.grad is None
    assert optimizer.step() == 264.0
    for shape in ((), (3, 2**20), (2**11, 2**10 + 1)):  # large ones are added in pieces
        weight, optimizer = one_weight(torch.zeros(shape, dtype=torch.bfloat16))
        for _ in range(2):
            weight.sum().backward()
        assert (optimizer.gradient_of(weight) == 2).all()


@both_dtypes
def test_what_is_added_to_a_gradient_counts_next_to_autograds(dtype):
    weight, optimizer = one_weight(torch.zeros(4, 4, dtype=dtype))

    for _ in range(2):  # whether or not autograd was there first
        optimizer.gradient_of(weight).add_(1.0)
        weight.sum().backward()

    assert (optimizer.gradient_of(weight) == 4).all()
    assert optimizer.gradient_of(weight).dtype == torch.float32
    assert optimizer.step() == 16.0
    assert (optimizer.gradient_of(weight) == 0).all()  # and not what the buffer still held
    optimizer.gradient_of(weight).fill_(7.0)
    optimizer.zero_grad()
    assert (optimizer.gradient_of(weight) == 0).all()
    assert optimizer.gradient_of(torch.zeros(4)) is None
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert optimizer.gradient_of(weight) is None
        handle.remove()
        assert optimizer.gradient_of(weight) is not None


def test_no_weight_has_moved_where_the_moments_do_not_fit(rng, monkeypatch):
    (model, optimizer), (twin, other) = build(torch.float32), build(torch.float32)
    repeated(rng, partial(backward, model, rng), partial(backward, twin, rng))
    room = [torch.zeros_like] * 5  # of eight: the matrices' four, and one of the vectors'

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", lambda *args, **options: room.pop()(*args, **options))
        with pytest.raises(IndexError):
            optimizer.step()

    assert not optimizer.mid_step and not optimizer.moments()
    assert same(model, twin)
    assert optimizer.step() == other.step()
    assert same(model, twin) and optimizer.mid_step


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1, 1, 0.868, 0.55, 0.232, 0.1, 0.1]),
    ],
)
def test_the_schedule_warms_up_and_falls_to_its_floor_by_steps(schedule, expected):
    config = {"learning_rate": 1.0, "schedule": schedule, "warmup_steps": 2}
    if schedule != "constant":
        config["min_learning_rate_ratio"] = 0.1
    weight, optimizer = one_weight(torch.ones(2), steps=6, **config)
    rates = []
    for _ in expected:
        rates.append(optimizer.learning_rate)
        weight.sum().backward()
        optimizer.step()
        assert optimizer.learning_rate == rates[-1]  # until the training step ends
        optimizer.advance()

    assert rates == pytest.approx(expected, abs=1e-3)


def test_a_band_moves_a_factor_of_the_schedule_that_resumes_and_is_reset():
    config = {"learning_rate": 1.0, "schedule": "linear"}
    config["band"] = {"metric": "reward/mean", "below": 0.5, "above": 0.8, "min": 0.95, "max": 1.2}
    _, optimizer = one_weight(torch.ones(2), steps=10, **config)
    factor, measured = 1.0, [0.4, 0.1, 0.5, 0.8, 0.9, 0.9, 0.9, math.nan]
    for step, reward in enumerate(measured):
        assert optimizer.learning_rate == pytest.approx(factor * (1 - step / 10))
        told = optimizer.follow({"reward/mean": reward, "update/skipped": float(math.isnan(reward))})
        assert told == {"learning_rate/factor": pytest.approx(factor)}
        factor = min(1.2, max(0.95, factor * (1.1 if reward < 0.5 else 0.9 if reward > 0.8 else 1)))
        optimizer.advance()
    assert factor == 0.95
    _, resumed = one_weight(torch.ones(2), steps=10, **config)
    resumed.load_state(optimizer.state())
    assert resumed.learning_rate == optimizer.learning_rate
    without = {"loss": 1.0, "update/skipped": 0.0}  # as some steps have no correlation
    assert optimizer.follow(without) == {"learning_rate/factor": 0.95}
    optimizer.reset_state()
    assert optimizer.learning_rate == 1.0
    with pytest.raises(ValueError, match="'reward/mean' is no number of this step: there are loss"):
        optimizer.follow(without)
    resumed.load_state({"steps": 3})  # of a run from before bands
    assert resumed.learning_rate == pytest.approx(0.7)


def test_what_cannot_be_stepped_or_loaded_leaves_the_weights_alone():
    weight, optimizer = one_weight(torch.ones(2))
    (weight * math.inf).sum().backward()
    with pytest.raises(Diverged, match="the gradient norm is inf"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2)) and weight.grad is None
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        optimizer.step()
    assert not optimizer.mid_step

    _, optimizer = build(torch.float32)
    tensors = optimizer.state_tensors()
    tensors["master.9.weight"] = tensors.pop("master.0.weight")
    with pytest.raises(ValueError, match=r"'master\.0\.weight' and 1 more"):
        load_into(optimizer, tensors)
    with pytest.raises(ValueError, match="parameters is empty"):
        PolicyOptimizer({}, CONFIG, total_steps=1)
