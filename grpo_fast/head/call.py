"""The head's calls, statistics and gradients as tuples, because torch's operators take and return tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class SharedOptions(TypedDict, total=False):
        """Keyword arguments of every public function of the head, documented in `linear_logprob`."""

        bias: Tensor | None
        temperature: float | Tensor
        logit_scale: float
        softcap: float | None
        tolerance: float | None
        seed: int | None
        process_group: ProcessGroup | None

    class HeadOptions(SharedOptions, total=False):
        """Keyword arguments of functions of one head."""

        ignore_index: int
        weight_grad: Tensor | None
        recompute: bool

    class KLOptions(SharedOptions, total=False):
        """Keyword arguments of `linear_kl`."""

        direction: Literal["reverse", "forward", "jsd"]
        beta: float
        ref_temperature: float | Tensor | None
        ref_bias: Tensor | None
        ref_logit_scale: float
        ref_softcap: float | None
        topk: int | None


ROW_IGNORED = -1
"""Target of an ignored row; its outputs and gradients are zero."""

ROW_INVALID = -2
"""Target outside the vocabulary: an error on a CPU, NaN on a device, where a check would stall it."""

LOG_ZERO = -500.0
"""A finite log 0, for products with a probability: its exponential is zero in float32."""

Function = TypeVar("Function", bound=Callable[..., object])
RowIndex = Tensor | slice  # which rows: indices, a mask or a range


def constant_when_compiled(function: Function) -> Function:
    """Mark as `torch.compiler.assume_constant_result` does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _select_rows(fields: Any, which: RowIndex, names: tuple[str, ...]) -> Any:
    """Index the named tensors that are present."""
    given = {name: tensor for name in names if (tensor := getattr(fields, name)) is not None}
    return fields._replace(**{name: tensor[which] for name, tensor in given.items()})


class HeadCall(NamedTuple):
    """N rows against V entries: z = softcap·tanh((x·w + bias)·logit_scale/softcap)·inv_temperature.

    The custom operators take these fields in this order.
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), same dtype
    targets: Tensor  # (N,) int64: < 0 ignored; >= V: worked on, but the target lies in another weight shard
    bias: Tensor | None = None  # (V,)
    inv_temperature: Tensor | None = None  # (N,) float32 or float64; None: one
    logit_scale: float = 1.0
    softcap: float | None = None
    # Statistics besides log-probability and log-sum-exp. One that is not requested is returned empty, (0,).
    entropy: bool = False
    mean_logit: bool = False
    max_logit: bool = False  # and the target's
    log_sum_sq: bool = False
    # What the forward prepares for the backward.
    jacobian: bool = False  # dlogprob/dhidden, or ddivergence/dhidden
    keep: bool = False  # the exponentials, N·V elements, on the kernels' path
    tolerance: float | None = None  # of the backward
    seed: int | None = None  # of the backward's sampling
    weight_grad: Tensor | None = None  # (V, H), to which the backward adds the weight's gradient in place

    @property
    def extra_statistics(self) -> int:
        """Number of optional statistics requested."""
        return self.entropy + self.mean_logit + self.max_logit + self.log_sum_sq

    @property
    def accumulator(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether logits are the products themselves, plus the bias."""
        return self.inv_temperature is None and self.logit_scale == 1.0 and self.softcap is None

    def rows(self, which: RowIndex) -> HeadCall:
        """Select rows."""
        return _select_rows(self, which, ("hidden", "targets", "inv_temperature"))

    def logits(self, columns: slice, out: Tensor | None = None) -> Tensor:
        """Compute (N, columns) logits in the accumulator's dtype."""
        return self.transform_(self.products(columns, out))

    def products(self, columns: slice, out: Tensor | None = None) -> Tensor:
        """Compute x·w + bias, (N, columns) in the accumulator's dtype."""
        kind = self.accumulator
        products = torch.mm(self.hidden.to(kind), self.weight[columns].to(kind).t(), out=out)
        return products if self.bias is None else products.add_(self.bias[columns].to(kind))

    def transform_(self, products: Tensor) -> Tensor:
        """Turn x·w + bias into logits, in place."""
        if self.softcap is not None:
            products.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.logit_scale != 1.0:
            products *= self.logit_scale
        if self.inv_temperature is not None:
            products *= self.inv_temperature.to(products.dtype)[:, None]
        return products

    def slope(self, products: Tensor) -> Tensor:
        """Compute dz/d(x·w) at x·w + bias, broadcastable to (N, columns)."""
        slope = products.new_full((), self.logit_scale)
        if self.inv_temperature is not None:
            slope = slope * self.inv_temperature.to(products.dtype)[:, None]
        if self.softcap is None:
            return slope
        tail = products.abs().mul_(-2 * abs(self.logit_scale) / self.softcap).exp_()
        # 1 - tanh² cancels where it saturates.
        return tail.div_((1 + tail).square_()).mul_(4 * slope)

    def targets_within(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return row and column, relative to the chunk, of each target in it."""
        row = ((self.targets >= columns.start) & (self.targets < columns.stop)).nonzero().squeeze(1)
        return row, self.targets[row] - columns.start


class KLCall(NamedTuple):
    """Two heads over the same N rows and V entries: the student, which is differentiated, and the reference.

    Targets are V in rows that count. The student's fields say what the forward prepares and how the backward
    samples.
    """

    student: HeadCall
    reference: HeadCall
    # (N,) log-sum-exps over all shards. With them the divergence is this shard's part of the whole sum.
    logsumexp: Tensor | None = None
    ref_logsumexp: Tensor | None = None
    direction: str = "reverse"
    beta: float = 0.5  # of "jsd"
    topk: int | None = None

    @classmethod
    def of_fields(cls, *fields: Any) -> KLCall:
        """Rebuild a call from `fields`, as the custom operators take it."""
        count = len(HeadCall._fields)
        return cls(HeadCall(*fields[:count]), HeadCall(*fields[count : 2 * count]), *fields[2 * count :])

    @property
    def fields(self) -> tuple[Any, ...]:
        return (*self.student, *self.reference, *self[2:])

    @property
    def mask(self) -> Tensor:
        """(N,) bool: rows that count."""
        return self.student.targets >= 0

    def rows(self, which: RowIndex) -> KLCall:
        """Select rows."""
        call = self._replace(student=self.student.rows(which), reference=self.reference.rows(which))
        return _select_rows(call, which, ("logsumexp", "ref_logsumexp"))


class RowDivergence(NamedTuple):
    """Per row, in the accumulator's dtype; zero for masked rows. The first two are differentiable."""

    divergence: Tensor  # (N,) nats; of this shard's distributions, or its part of the whole sum
    logsumexp: Tensor  # (N,) of the student's logits
    ref_logsumexp: Tensor  # (N,)
    shift: Tensor  # (N,) the difference of the log-sum-exps, to more digits
    center: Tensor  # (N,) KL(student || mixture) of "jsd", or its part; otherwise the divergence

    @classmethod
    def allocate(cls, call: KLCall) -> RowDivergence:
        like = call.student.hidden
        kind, rows = call.student.accumulator, like.shape[0]
        return cls(*(like.new_zeros(rows, dtype=kind) for _ in cls._fields))


class DivergenceGradients(NamedTuple):
    """Upstream gradients of a divergence's results, (N,)."""

    divergence: Tensor
    logsumexp: Tensor | None = None

    def live(self, call: KLCall) -> Tensor:
        """(N,) bool: rows that count and have an upstream gradient."""
        live = self.divergence != 0
        return call.mask & (live if self.logsumexp is None else live | (self.logsumexp != 0))


class RowStatistics(NamedTuple):
    """Per row, in the accumulator's dtype; zero for ignored rows. All differentiable but the last three."""

    logprob: Tensor  # (N,) log-probability of the target; zero where the target is in another shard
    logsumexp: Tensor  # (N,)
    entropy: Tensor  # (N,) nats
    mean_logit: Tensor  # (N,) over the vocabulary
    max_logit: Tensor  # (N,)
    target_logit: Tensor  # (N,) comes with max_logit; zero where the target is in another shard
    log_sum_sq: Tensor  # (N,) log Σ p²

    @classmethod
    def allocate(cls, call: HeadCall) -> RowStatistics:
        """Return zeros for the requested statistics."""
        extremes = (call.max_logit, call.max_logit, call.log_sum_sq)
        wanted = (True, True, call.entropy, call.mean_logit, *extremes)
        rows, kind = call.targets.numel(), call.accumulator
        return cls(*(call.hidden.new_zeros(rows if want else 0, dtype=kind) for want in wanted))


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward; empty where its path does not read them."""

    jacobian: Tensor  # (N, H) dlogprob/dhidden or ddivergence/dhidden
    # Of kernels:
    tile_lse: Tensor  # (N, T) float32; of a divergence, lse + log of each tile's share of `row_scale`
    exponentials: Tensor  # (N, V), as in `SavedExp`
    row_scale: Tensor  # (N,) float32: share of `SavedExp`, or bound of the l1 norm of ddivergence/dlogits

    @classmethod
    def empty(cls, call: HeadCall, *, jacobian: bool = False) -> Saved:
        """Return no values, or a jacobian of zeros."""
        shape = call.hidden.shape if jacobian else 0
        zeros = call.hidden.new_zeros(shape, dtype=call.accumulator)
        kinds = torch.float32, call.hidden.dtype, torch.float32
        return cls(zeros, *(call.hidden.new_empty(0, dtype=kind) for kind in kinds))


class RowGradients(NamedTuple):
    """Upstream gradient of each differentiable statistic, (N,) or None."""

    logprob: Tensor | None
    logsumexp: Tensor | None = None
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None

    @property
    def follows_softmax(self) -> bool:
        """Whether a row's logit gradient is a multiple of its probabilities, except at the target."""
        return self.entropy is None and self.mean_logit is None

    def live(self, call: HeadCall) -> Tensor:
        """(N,) bool: rows that are not ignored and have an upstream gradient."""
        given = [gradient != 0 for gradient in self if gradient is not None]
        working = call.targets >= 0
        return working & torch.stack(given).any(0) if given else torch.zeros_like(working)


class LogitGradient(NamedTuple):
    """Coefficients of the logit gradient, (N,) each in the accumulator's dtype; zero in ignored rows.

    dL/dz_v = p_v·(mass - entropy_gradient·(log p_v + entropy)) + mean, and `target` + mean at the target.
    """

    logsumexp: Tensor
    mass: Tensor  # g_logsumexp - g_logprob
    target: Tensor  # -g_logprob·expm1(log p) + ..., formed without cancellation
    logprob: Tensor  # of the target
    entropy: Tensor | None = None  # nats; None: no gradient through the entropy
    entropy_gradient: Tensor | None = None
    mean: Tensor | None = None  # g_mean_logit / V

    @classmethod
    def of(cls, call: HeadCall, statistics: RowStatistics, gradients: RowGradients) -> LogitGradient:
        logprob = statistics.logprob
        zero, live = torch.zeros_like(logprob), gradients.live(call)

        def upstream(gradient: Tensor | None, where: Tensor = live) -> Tensor:
            return zero if gradient is None else torch.where(where, gradient, zero)

        of_logprob = upstream(gradients.logprob, live & (call.targets < call.vocabulary))
        of_logsumexp = upstream(gradients.logsumexp)
        p = logprob.exp()
        target = of_logprob * -logprob.expm1() + of_logsumexp * p  # near p = 1, 1 - p is rounding noise
        entropy, of_entropy, mean = None, None, None
        if gradients.entropy is not None:
            entropy, of_entropy = statistics.entropy, upstream(gradients.entropy)
            target = target - of_entropy * p * (logprob.clamp_min(LOG_ZERO) + entropy)
        if gradients.mean_logit is not None:
            mean = upstream(gradients.mean_logit) / call.vocabulary
        target = torch.where(live, target, zero)  # an ignored row may hold NaN
        mass = of_logsumexp - of_logprob
        return cls(statistics.logsumexp, mass, target, logprob, entropy, of_entropy, mean)

    @property
    def coefficients(self) -> list[Tensor]:
        """(N,) each; a row has a gradient where one of them is not zero."""
        every = (self.mass, self.target, self.entropy_gradient, self.mean)
        return [coefficient for coefficient in every if coefficient is not None]

    def live(self) -> Tensor:
        """(N,) bool: rows with a gradient, NaN included."""
        return torch.stack([coefficient != 0 for coefficient in self.coefficients]).any(0)

    def of_products(self, call: HeadCall, columns: slice) -> Tensor:
        """Compute dL/d(x·w + bias), (N, columns)."""
        products = call.products(columns)
        slope = None if call.is_plain else call.slope(products)
        z = call.transform_(products)
        z -= self.logsumexp[:, None]
        if self.entropy is None or self.entropy_gradient is None:
            gradient = z.exp_().mul_(self.mass[:, None])
        else:
            surprise = self.entropy_gradient[:, None] * (z.clamp_min(LOG_ZERO) + self.entropy[:, None])
            gradient = z.exp_() * (self.mass[:, None] - surprise)
        row, column = call.targets_within(columns)
        gradient[row, column] = self.target[row]
        if self.mean is not None:
            gradient += self.mean[:, None]
        return gradient if slope is None else gradient.mul_(slope)

    def rows(self, which: RowIndex) -> LogitGradient:
        """Select rows."""
        return _select_rows(self, which, self._fields)


class Shard(NamedTuple):
    """This rank's rows of a weight that is split by vocabulary."""

    group: ProcessGroup
    start: Tensor  # () int64, first of its rows
    vocabulary: Tensor  # () int64, entries over all ranks

    @classmethod
    def of(cls, weight: Tensor, group: ProcessGroup) -> Shard:
        """Gather the sizes of all shards; a collective without a host synchronization."""
        own = torch.full((1,), weight.shape[0], device=weight.device)
        sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, own, group=group)
        entries = torch.cat(sizes)
        return cls(group, entries[: dist.get_rank(group)].sum(), entries.sum())


class Wanted(NamedTuple):
    """The gradients that a backward computes. A new gradient of a parameter has the parameter's dtype."""

    hidden: bool
    weight: bool
    bias: bool
    into_weight: Tensor | None = None  # (V, H) of any float dtype, unit stride along H; added to in place


class HeadGradients(NamedTuple):
    """Gradients of a backward; None where not requested."""

    hidden: Tensor | None  # (N, H), dtype of hidden
    weight: Tensor | None  # (V, H), dtype of weight
    bias: Tensor | None  # (V,), dtype of bias


_KINDS: dict[object, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", float | None: "float?", bool: "bool",
    int: "int", int | None: "SymInt?", str: "str",
}  # fmt: skip


def schema_of(kind: type, prefix: str = "") -> str:
    """Return the fields of a NamedTuple type, nested ones too, as arguments in torch's operator schema."""
    arguments: list[str] = []
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            arguments.append(schema_of(hint, "" if not arguments else f"{name}_"))
        else:
            arguments.append(f"{_KINDS[hint]} {prefix}{name}")
    return ", ".join(arguments)
