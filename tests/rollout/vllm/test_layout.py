"""Watching a loader, on a model that fuses, pads, ties, slices and repacks as engines do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from grpo_fast.rollout.vllm.layout import Landing, live, share, size_in_bytes, storage_of, watch_loading

WIDTH, ROWS, PADDED = 4, 6, 8
SIZES = {"q": 4, "k": 2, "v": 2}


class Engine(nn.Module):
    """`qkv` is fused, `embed` padded and tied to `head`, `slice` half of a weight, `up` gets packed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(sum(SIZES.values()), WIDTH))
        self.embed = nn.Parameter(torch.zeros(PADDED, WIDTH))
        self.head = self.embed
        self.down = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.slice = nn.Parameter(torch.zeros(WIDTH, WIDTH // 2))
        self.up = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        starts = {"q": 0, "k": SIZES["q"], "v": SIZES["q"] + SIZES["k"]}
        for name, weight in weights:
            if name in starts:
                self.qkv.data.narrow(0, starts[name], SIZES[name]).copy_(weight)
            elif name == "embed":
                self.embed.data[:ROWS].copy_(weight)
            elif name == "slice":
                self.slice.data.copy_(weight[:, WIDTH // 2 :])
            else:
                getattr(self, name).data.copy_(weight)

    def pack(self) -> None:
        self.up = nn.Parameter(self.up.data.T.contiguous())


@pytest.fixture
def parameters(rng) -> dict[str, nn.Parameter]:
    shapes = {name: (rows, WIDTH) for name, rows in SIZES.items()}
    shapes |= {"embed": (ROWS, WIDTH), **dict.fromkeys(("down", "slice", "up"), (WIDTH, WIDTH))}
    return {name: nn.Parameter(torch.randn(shape, generator=rng)) for name, shape in shapes.items()}


@pytest.fixture
def engine() -> Engine:
    return Engine()


def detached(parameters: dict[str, nn.Parameter]) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in parameters.items()]


def watch(engine: Engine, parameters: dict[str, nn.Parameter]) -> dict[str, Landing]:
    return {part.name: part for part in watch_loading(engine.load_weights, detached(parameters))}


def test_every_weight_is_found_where_the_loader_put_it(engine, parameters):
    landings = watch(engine, parameters)

    assert set(landings) == set(parameters)
    assert all(landings[name].holds(weight) for name, weight in parameters.items())
    assert landings["v"].target.storage_offset() == (SIZES["q"] + SIZES["k"]) * WIDTH


def test_the_copies_made_again_load_what_the_loader_would(engine, parameters, rng):
    landings = watch(engine, parameters)
    other = Engine()
    for parameter in parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=rng)

    for name, weight in detached(parameters):
        landings[name].load(weight)
    other.load_weights(detached(parameters))

    for (name, mine), expected in zip(engine.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, expected), name


def test_a_weight_that_was_computed_on_the_way_has_no_landing(engine, parameters):
    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        engine.load_weights((name, 2 * weight if name == "q" else weight) for name, weight in weights)

    landings = watch_loading(load, detached(parameters))

    assert {part.name for part in landings} == set(parameters) - {"q"}


def test_a_repacked_weight_has_left_its_landing(engine, parameters):
    landings = watch(engine, parameters)
    engine.pack()

    assert {part.name for part in live(engine, landings.values())} == set(parameters) - {"up"}


def test_shared_weights_are_one_memory_and_keep_their_values_and_identities(engine, parameters):
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    own = {parameter.data_ptr() for parameter in parameters.values()}

    landings = watch(engine, parameters)
    shared = share(engine, parameters, list(landings.values()))

    aliased = {part.name for part in shared if part.aliases(parameters[part.name])}
    assert aliased == set(parameters) - {"slice"}  # of which the engine has a slice
    assert engine.down.data_ptr() in own  # a whole weight needs no new memory
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
        assert parameter.is_contiguous()
    assert engine.head is engine.embed
    assert torch.equal(engine.embed[ROWS:], torch.zeros(PADDED - ROWS, WIDTH))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(3)
    assert torch.equal(engine.qkv, 3 * torch.cat([before[name] for name in SIZES]))
    assert torch.equal(engine.head[:ROWS], 3 * before["embed"])
    assert torch.equal(engine.down, 3 * before["down"])
    assert torch.equal(engine.slice, before["slice"][:, WIDTH // 2 :])


def test_weights_shared_while_an_engine_loads_in_inference_mode_can_be_trained(parameters):
    with torch.inference_mode():
        engine = Engine()  # its own tensors could not
        share(engine, parameters, list(watch(engine, parameters).values()))

    for parameter in parameters.values():
        assert not parameter.is_inference()
        parameter.square().sum().backward()
        with torch.no_grad():
            parameter -= parameter.grad
    assert storage_of(engine.qkv) == storage_of(parameters["q"])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("down", lambda weight: nn.Parameter(weight.data.double())),
        ("q", lambda weight: nn.Parameter(weight.data.T.contiguous().T)),
    ],
    ids=["another dtype", "another layout"],
)
def test_what_differs_in_dtype_or_layout_is_not_shared(
    engine, parameters, name: str, spoil: Callable[[nn.Parameter], nn.Parameter]
):
    parameters[name] = spoil(parameters[name])
    landings = watch(engine, parameters)

    shared = share(engine, parameters, list(landings.values()))

    assert not any(part.aliases(parameters[part.name]) for part in shared if part.name == name)
    assert all(part.holds(parameters[part.name]) for part in shared)


def test_a_tensor_loaded_twice_from_one_weight_is_not_shared(parameters):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(2))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, weight in weights:
                self.first.data.copy_(weight)
                self.second.data.copy_(weight)

    engine, down = Twice(), {"down": parameters["down"]}
    landings = watch_loading(engine.load_weights, detached(down))

    shared = share(engine, down, landings)

    assert len(shared) == 2
    assert not any(part.aliases(down["down"]) for part in shared)


def test_sizes_count_tied_weights_once_and_leave_out_what_is_asked(engine, parameters):
    elements = sum(parameter.numel() for parameter in engine.parameters())

    assert size_in_bytes(engine) == 4 * elements
    embed = engine.embed.untyped_storage().data_ptr()
    assert size_in_bytes(engine, without={embed}) == 4 * (elements - PADDED * WIDTH)
