"""What each operation makes of the examples of a batch.

A value is one of four kinds. `Free`: nothing of the batch. `Each`: along one axis it has a part for
each example, in order, which depends on that example alone. `Total`: a sum of such parts over the
examples. `Unproved`: anything else, with the reason. An operation that has no rule here is not
trusted: its results are `Unproved`.

Everything is told of two traces of one program, of a batch and of a slice of it, whose shapes,
constants and parameters are compared: that is how a divisor that is the number of examples is
told from another number (its ``growth``), and an axis of the batch from one of equal length.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem import _jax
from jaxmem._slicing import ELEMENTWISE, REDUCTIONS

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Nothing of the batch: the same in both traces, times ``growth``.

    Attributes:
        growth: how many times larger it is for the batch than for the slice.
        value: where all its elements are one known number, that number in each trace. Only then
            may its shape depend on the size of the batch.
        drawn: it comes from the random key of the step, of which each slice gets its own.
        moved: it comes from a model state that one slice hands on, changed, to the next.
    """

    growth: float = 1.0
    value: tuple[Any, Any] | None = None
    drawn: bool = False
    moved: bool = False

    @property
    def is_zero(self) -> bool:
        return self.value is not None and not any(self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Each:
    """Parts of the examples, in order, along ``axis``, which has ``outer * examples * inner``
    indices: examples come once in each of ``outer`` blocks, ``inner`` indices at a time.

    ``inner`` is None where all indices of the axis have the same, as after a broadcast; then
    ``outer`` says nothing.
    """

    axis: int
    outer: int = 1
    inner: int | None = 1
    growth: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """As `Each`, of all elements in row-major order, whatever the shapes: in a slice of one example
    the axis of the examples may be gone."""

    outer: int
    inner: int
    growth: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """The number of each example, from 0, along ``axis``: good for picking its own part only."""

    axis: int


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Along the last axis the kinds of several indices for a gather, one of them `Index`."""

    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """A sum over examples of what depends on one alone, times a number of this growth. With the
    growth of a mean something `Free` may have been added."""

    growth: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Unproved:
    """The reason, a clause that names the operation and its line."""

    why: str


Kind = Free | Each | Flat | Index | Columns | Total | Unproved


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation in both traces.

    Attributes:
        steps: itself; the second is of the slice.
        kinds: of its operands.
        shapes, results: of operands and results in both traces.
        sizes: numbers of examples.
    """

    steps: tuple[_jax.Step, _jax.Step]
    kinds: list[Any]
    shapes: list[tuple[Shape, Shape]]
    results: list[tuple[Shape, Shape]]
    sizes: tuple[int, int]

    @property
    def name(self) -> str:
        return self.steps[0].primitive

    @property
    def params(self) -> dict[str, Any]:
        return self.steps[0].equation.params

    @property
    def where(self) -> str:
        return f"{self.name} at {self.steps[0].line}"

    @property
    def mixes(self) -> Unproved:
        return Unproved(f"its examples see one another ({self.where})")

    @property
    def bends(self) -> Unproved:
        return Unproved(f"it is no plain mean over examples ({self.where})")

    @property
    def sized(self) -> Unproved:
        return Unproved(f"it depends on the size of the batch in another way ({self.where})")

    @property
    def unknown(self) -> Unproved:
        return Unproved(f"whether it keeps examples apart is not known ({self.where})")

    def alike(self, *but: str) -> bool:
        """Whether both traces have the same parameters, but for some."""
        one, two = (step.equation.params for step in self.steps)
        return one.keys() == two.keys() and all(
            name in but or _equal(one[name], two[name]) for name in one
        )

    def inexact(self) -> bool:
        aval = self.steps[0].equation.outvars[0].aval
        return jnp.issubdtype(aval.dtype, jnp.inexact)

    def each(self, axis: int, like: Each, at: int = 0) -> Each | Unproved:
        """The kind of a result with the examples of another value along an axis."""
        result = dataclasses.replace(like, axis=axis)
        return result if lies(result, self.results[at], self.sizes) else self.mixes


def lies(kind: Each, shapes: tuple[Shape, Shape], sizes: tuple[int, int]) -> bool:
    """Whether a value of these shapes can have the examples as the kind says, and nowhere else."""
    one, two = shapes
    if len(one) != len(two) or not 0 <= kind.axis < len(one):
        return False
    if any(a != b for at, (a, b) in enumerate(zip(one, two, strict=True)) if at != kind.axis):
        return False
    here = one[kind.axis], two[kind.axis]
    if kind.inner is None:
        return here[0] * sizes[1] == here[1] * sizes[0]
    return here == tuple(kind.outer * size * kind.inner for size in sizes)


def flat(kind: Kind, shapes: tuple[Shape, Shape], sizes: tuple[int, int]) -> Flat | None:
    """A value by its elements in row-major order; None: it has no examples in order."""
    if isinstance(kind, Flat):
        return kind
    if not isinstance(kind, Each):
        return None
    shape, outer, inner = shapes[0], kind.outer, kind.inner
    if inner is None:
        outer, (inner, rest) = 1, divmod(shape[kind.axis], sizes[0])
        if rest:
            return None
    before, behind = math.prod(shape[: kind.axis]), math.prod(shape[kind.axis + 1 :])
    return Flat(before * outer, inner * behind, kind.growth)


def shaped(kind: Flat, shapes: tuple[Shape, Shape], sizes: tuple[int, int]) -> Kind | None:
    """The kind of elements in row-major order in these shapes; None: one axis is not enough."""
    one, two = shapes
    if len(one) != len(two):
        return kind
    axes = [axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    if len(axes) != 1:
        return None
    (axis,) = axes
    inner, rest = divmod(kind.inner, math.prod(one[axis + 1 :]) or 1)
    outer, more = divmod(one[axis], inner * sizes[0]) if inner else (0, 1)
    found = Each(axis, outer, inner, kind.growth)
    return found if not rest and not more and lies(found, shapes, sizes) else None


def mean_growth(sizes: tuple[int, int]) -> float:
    """How many times larger ``1 / examples`` is for the batch."""
    return sizes[1] / sizes[0]


def close(one: float, two: float) -> bool:
    """Growths are products of constants, in float32 mostly."""
    return math.isclose(one, two, rel_tol=1e-5)


def constant(one: Any, two: Any) -> Kind:
    """Of a constant of the program, in both traces."""
    if one is two:
        number = _number(one)
        return Free(value=None if number is None else (number, number))
    if any(map(_jax.is_opaque, (one, two))):
        return Unproved("it closes over a value of the trace that is another for a slice")
    numbers = _number(one), _number(two)
    if None not in numbers:
        return valued(*numbers)
    if np.shape(one) == np.shape(two) and np.array_equal(np.asarray(one), np.asarray(two)):
        return Free()
    return Unproved("a constant of it depends on the size of the batch")


def valued(one: Any, two: Any) -> Free:
    """Of one known number in each trace."""
    if one == two or (one != one and two != two):  # NaN too
        return Free(value=(one, two))
    return Free(growth=float(one / two) if two and one else math.nan, value=(one, two))


def results(operation: Operation) -> list[Kind]:
    """The kinds of the results of an equation without programs inside."""
    count = len(operation.results)
    made = _special(operation)
    if made is not None:
        return [made] * count
    for kind in operation.kinds:
        if isinstance(kind, Unproved):
            return [kind] * count
        if isinstance(kind, Index | Columns):
            return [
                Unproved(f"it uses the place of an example in the batch ({operation.where})")
            ] * count
    if all(isinstance(kind, Free) for kind in operation.kinds):
        number = _calculated(operation)
        if number is not None:
            return [number]
        if all(one == two for one, two in operation.shapes):
            return _of_free(operation)
        kinds: list[Kind] = [_spread_out(operation, at) for at in range(len(operation.kinds))]
        operation = dataclasses.replace(operation, kinds=kinds)
    moved = any(isinstance(kind, Free) and kind.moved for kind in operation.kinds)
    if moved and operation.name not in _RANDOM:
        why = "it uses a model state that each slice changes"
        return [Unproved(f"{why} ({operation.where})")] * count
    if operation.name in _PASSED:
        return list(operation.kinds)
    if any(isinstance(kind, Total) for kind in operation.kinds):
        return [_linear(operation)] * count
    rule = _RULES.get(operation.name)
    if rule is None:
        return [operation.unknown] * count
    growing = any(not close(kind.growth, 1) for kind in operation.kinds)
    if growing and operation.name not in _HOMOGENEOUS - _LINEAR_IN_SUMS_ONLY:
        return [operation.sized] * count
    if operation.name not in _OWN_PARAMETERS and not operation.alike(
        *_SIZES.get(operation.name, ())
    ):
        return [operation.sized] * count
    flats = any(isinstance(kind, Flat) for kind in operation.kinds)
    if flats and operation.name not in ("dot_general", "gather", "reshape"):
        return [operation.unknown] * count
    found = rule(operation)
    return found if isinstance(found, list) else [found] * count


# ---- nothing of the batch


def _of_free(op: Operation) -> list[Kind]:
    kinds = op.kinds
    drawn = any(kind.drawn for kind in kinds)
    moved = any(kind.moved for kind in kinds) and op.name not in _RANDOM
    drawn = drawn or (op.name in _RANDOM and any(kind.moved for kind in kinds))
    if any(one != two for one, two in op.results):
        return [_spread(op, at, drawn) for at in range(len(op.results))]
    growths = [kind.growth for kind in kinds]
    growth: float | None = 1.0
    if not all(close(growth, 1) for growth in growths):
        growth = _grown(op, growths, kinds)
    if growth is None or not op.alike(*_CODE):
        return [op.sized] * len(op.results)
    if op.name in _PASSED:
        return list(kinds)
    return [Free(growth, drawn=drawn, moved=moved)] * len(op.results)


def _spread(op: Operation, at: int, drawn: bool) -> Kind:
    """Of a result whose shape has the batch in it, though no operand has."""
    one, two = op.results[at]
    axes = [axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    if len(axes) != 1:
        return op.mixes
    (axis,) = axes
    if any(not close(kind.growth, 1) for kind in op.kinds):
        return op.sized
    if op.name in ("random_bits", "random_split", "rng_bit_generator"):
        if not drawn:
            return Unproved(
                f"it draws random numbers for the batch from a key that all slices would have in "
                f"common; take it from key= ({op.where})"
            )
        inner, rest = divmod(one[axis], op.sizes[0])
        return op.each(axis, Each(axis, 1, inner), at) if not rest else op.mixes
    if op.name == "iota" and op.params["dimension"] == axis:
        alone = one[axis] == op.sizes[0] and two[axis] == op.sizes[1]
        numbers = Index(axis) if alone else None
        return numbers or Unproved(f"it uses the place of an example in the batch ({op.where})")
    if op.name == "iota" or (op.name == "broadcast_in_dim" and op.alike("shape", "sharding")):
        return op.each(axis, Each(axis, 1, None), at)
    return op.sized


_ARITHMETIC: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "neg": np.negative, "sqrt": np.sqrt, "abs": np.abs, "exp": np.exp,
    "log": np.log, "square": np.square, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip
_SAME_NUMBERS = frozenset(
    """
    broadcast_in_dim convert_element_type copy expand_dims optimization_barrier reduce_precision
    reshape sharding_constraint slice squeeze stop_gradient transpose
    """.split()
)


def _calculated(op: Operation) -> Free | None:
    """Of numbers that are known, where the result is one too."""
    values = [kind.value for kind in op.kinds]
    if not values or None in values or len(op.results) != 1:
        return None
    flags = {"drawn": any(k.drawn for k in op.kinds), "moved": any(k.moved for k in op.kinds)}
    if any(flags.values()):
        return None
    dtype = op.steps[0].equation.outvars[0].aval.dtype
    if jnp.issubdtype(dtype, jnp.unsignedinteger) or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    numbers = []
    for which in (0, 1):
        given = [value[which] for value in values]
        if op.name in _SAME_NUMBERS:
            number = given[0]
        elif op.name == "reduce_sum":
            shape, axes = op.shapes[0][which], op.params["axes"]
            number = given[0] * math.prod(shape[axis] for axis in axes)
        elif op.name == "integer_pow":
            number = given[0] ** op.params["y"]
        elif op.name == "div" and given[1] != 0:
            exact = jnp.issubdtype(dtype, jnp.integer)
            number = int(given[0] / given[1]) if exact else given[0] / given[1]
        elif op.name in _ARITHMETIC and not (op.name in ("and", "or", "not") and dtype != np.bool_):
            with np.errstate(all="ignore"):
                number = _ARITHMETIC[op.name](*given).item()
        else:
            return None
        if jnp.issubdtype(dtype, jnp.integer):
            number = int(number)
        numbers.append(number)
    return valued(*numbers)


# ---- elementwise


_SCATTER_ADD = ("scatter-add", "scatter_add")
_LINEAR = frozenset(
    """
    add_any broadcast_in_dim concatenate convert_element_type copy cumsum dynamic_slice gather
    imag mul name neg optimization_barrier pad real reduce_precision reduce_sum reshape rev
    select_n sharding_constraint slice split squeeze sub add stop_gradient transpose div
    dot_general stack unstack
    """.split()
)
# Of operands that grow with the batch the results grow as much.
_HOMOGENEOUS = _LINEAR | {"integer_pow", "square", *_SCATTER_ADD}
# Whose rules for examples do not look at the growth.
_LINEAR_IN_SUMS_ONLY = frozenset({"cumsum", "dynamic_slice", "gather", "rev"})
_SUMS = frozenset({"add", "sub", "add_any", "concatenate", "pad", "stack"})


def _elementwise(op: Operation) -> Kind:
    """Examples stay in their places, if they have the same ones in all operands."""
    growth = _grown(op, [kind.growth for kind in op.kinds], op.kinds)
    if growth is None:
        return op.sized
    own = [kind for kind in op.kinds if isinstance(kind, Each)]
    common = agreed(own)
    if common is None:
        return op.mixes
    for kind, (one, _) in zip(op.kinds, op.shapes, strict=True):
        beside = one and isinstance(kind, Free) and kind.value is None
        if beside and (len(one) <= common.axis or one[common.axis] != 1):
            return op.mixes
    return op.each(common.axis, dataclasses.replace(common, growth=growth))


def agreed(kinds: Sequence[Each]) -> Each | None:
    """The place of the examples in values that go together, or None: it is not the same."""
    found = kinds[0]
    for kind in kinds[1:]:
        if kind.axis != found.axis:
            return None
        if found.inner is None:
            found = kind
        elif kind.inner is not None and (kind.outer, kind.inner) != (found.outer, found.inner):
            return None
    return found


def _grown(op: Operation, growths: list[float], kinds: Sequence[Any]) -> float | None:
    """The growth of a result that is linear in what grows; None: it is not."""
    name = op.name
    if all(close(growth, 1) for growth in growths):
        return 1.0
    if any(math.isnan(growth) for growth in growths) or name not in _HOMOGENEOUS:
        return None
    if name in ("mul", "dot_general"):
        return math.prod(growths)
    if name == "div":
        return growths[0] / growths[1] if op.inexact() else None
    if name in ("square", "integer_pow"):
        return growths[0] ** op.params.get("y", 2)
    if name == "convert_element_type" and not op.inexact():
        return None
    if name in _SUMS or name == "select_n":
        chosen = list(zip(kinds, growths, strict=True))
        if name == "select_n":
            if not close(growths[0], 1):
                return None
            chosen = chosen[1:]
        found = [growth for kind, growth in chosen if not (isinstance(kind, Free) and kind.is_zero)]
        return found[0] if found and all(close(found[0], other) for other in found) else None
    return growths[0] if all(close(growth, 1) for growth in growths[1:]) else None


# ---- sums over examples


def _linear(op: Operation) -> Kind:
    """Of a sum over examples: it may go on in a straight line."""
    kinds, name = op.kinds, op.name
    if any(isinstance(kind, Each) for kind in kinds):
        return op.mixes
    if any(one != two for one, two in op.results):
        return op.mixes
    if name not in _LINEAR or not op.alike():
        return op.bends
    totals = [kind for kind in kinds if isinstance(kind, Total)]
    free = [kind for kind in kinds if isinstance(kind, Free)]
    if name == "convert_element_type":
        made = op.steps[0].equation.invars[0].aval.dtype
        if jnp.issubdtype(made, jnp.inexact) and not op.inexact():
            return op.bends
    if name in _SUMS or name == "select_n":
        if name == "select_n":
            if not isinstance(kinds[0], Free) or not close(kinds[0].growth, 1):
                return op.bends
            free = free[1:]
        growth = totals[0].growth
        if not all(close(growth, total.growth) for total in totals):
            return op.bends
        beside = [kind for kind in free if not kind.is_zero]
        mean = close(growth, mean_growth(op.sizes))
        if beside and not (mean and all(close(kind.growth, 1) for kind in beside)):
            return op.bends
        return Total(growth)
    if len(totals) != 1 or (not isinstance(kinds[0], Total) and name not in ("mul", "dot_general")):
        return op.bends
    growths = [kind.growth for kind in kinds]
    if any(map(math.isnan, growths)) or (name == "div" and not op.inexact()):
        return op.bends
    if name in ("mul", "dot_general"):
        return Total(math.prod(growths))
    if name == "div":
        return Total(growths[0] / growths[1])
    return Total(growths[0]) if all(close(growth, 1) for growth in growths[1:]) else op.bends


# ---- operations that know their axes


def _only(op: Operation, at: int = 0) -> Each | None:
    """The examples of one operand, where none of the others has any."""
    others = [kind for index, kind in enumerate(op.kinds) if index != at]
    kind = op.kinds[at]
    return kind if isinstance(kind, Each) and all(isinstance(k, Free) for k in others) else None


def _spread_out(op: Operation, at: int) -> Free | Each:
    """The kind of an operand; of one number in the shape of the batch, as examples."""
    kind, (one, two) = op.kinds[at], op.shapes[at]
    if isinstance(kind, Each) or one == two:
        return kind
    axes = [axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return Each(axes[0], 1, None, kind.growth)


def _broadcast(op: Operation) -> Kind:
    kind = op.kinds[0]
    return op.each(op.params["broadcast_dimensions"][kind.axis], kind)


def _reshape(op: Operation) -> Kind:
    """The axis of the result in which examples lie apart by as many elements as before."""
    kind = op.kinds[0]
    if op.params.get("dimensions") is not None:
        return op.unknown
    elements = flat(kind, op.shapes[0], op.sizes)
    found = None if elements is None else shaped(elements, op.results[0], op.sizes)
    if found is None:
        return op.mixes
    uniform = isinstance(kind, Each) and kind.inner is None
    if uniform and isinstance(found, Each) and found.outer == found.inner == 1:
        return Each(found.axis, 1, None, found.growth)
    return found


def _transpose(op: Operation) -> Kind:
    return op.each(list(op.params["permutation"]).index(op.kinds[0].axis), op.kinds[0])


def _squeeze(op: Operation) -> Kind:
    kind, gone = op.kinds[0], op.params["dimensions"]
    if kind.axis in gone:
        return op.mixes
    return op.each(kind.axis - sum(axis < kind.axis for axis in gone), kind)


def _reduce(op: Operation) -> Kind:
    kind, axes = op.kinds[0], op.params["axes"]
    if kind.axis not in axes:
        return op.each(kind.axis - sum(axis < kind.axis for axis in axes), kind)
    if op.name == "reduce_sum" and op.results[0][0] == op.results[0][1]:
        return Total(kind.growth)
    return op.mixes


def _along(parameter: str) -> Callable[[Operation], Any]:
    """Of what mixes the elements along one axis, or several."""

    def rule(op: Operation) -> list[Kind] | Kind:
        given = op.params[parameter]
        axes = given if isinstance(given, tuple | list) else (given,)
        own = [kind for kind in op.kinds if isinstance(kind, Each)]
        beside = [kind for kind in op.kinds if isinstance(kind, Free) and kind.value is None]
        common = agreed(own)
        if common is None or beside or common.axis in axes:
            return op.mixes
        return [op.each(common.axis, common, at) for at in range(len(op.results))]

    return rule


def _last(axes: Callable[[Operation], int]) -> Callable[[Operation], Any]:
    """Of what mixes the elements along some of the last axes, as matrices do."""

    def rule(op: Operation) -> list[Kind] | Kind:
        own = [kind for kind in op.kinds if isinstance(kind, Each)]
        beside = [kind for kind in op.kinds if isinstance(kind, Free) and kind.value is None]
        common, rank = agreed(own), len(op.shapes[0][0])
        if common is None or beside or common.axis >= rank - axes(op):
            return op.mixes
        return [op.each(common.axis, common, at) for at in range(len(op.results))]

    return rule


def _concatenate(op: Operation) -> Kind:
    axis, growth = op.params["dimension"], _grown(op, [k.growth for k in op.kinds], op.kinds)
    own = [kind for kind in op.kinds if isinstance(kind, Each)]
    if growth is None:
        return op.sized
    if any(isinstance(kind, Free) and kind.value is None for kind in op.kinds):
        return op.mixes
    common = agreed(own)
    if common is not None and common.axis != axis:
        return op.each(common.axis, dataclasses.replace(common, growth=growth))
    if any(kind.axis != axis or kind.inner is None for kind in own) or len(own) < len(op.kinds):
        return op.mixes
    if len({kind.inner for kind in own}) > 1:
        return op.mixes
    outer = sum(kind.outer for kind in own)
    return op.each(axis, dataclasses.replace(own[0], outer=outer, growth=growth))


def _stack(op: Operation) -> Kind:
    growth = _grown(op, [kind.growth for kind in op.kinds], op.kinds)
    common = agreed([kind for kind in op.kinds if isinstance(kind, Each)])
    if growth is None:
        return op.sized
    if common is None or any(isinstance(kind, Free) and kind.value is None for kind in op.kinds):
        return op.mixes
    axis = common.axis + (op.params["axis"] <= common.axis)
    return op.each(axis, dataclasses.replace(common, growth=growth))


def _unstack(op: Operation) -> list[Kind] | Kind:
    kind, axis = op.kinds[0], op.params["axis"]
    if axis == kind.axis:
        return op.mixes
    return [op.each(kind.axis - (axis < kind.axis), kind, at) for at in range(len(op.results))]


def _blocks(op: Operation, start: tuple[int, int], stop: tuple[int, int], kind: Each) -> int | None:
    """How many whole blocks of all examples are between two indices, in both traces."""
    if kind.inner is None:
        return None
    unit = [size * kind.inner for size in op.sizes]
    places = [
        (a // each, b // each)
        for a, b, each in zip(start, stop, unit, strict=True)
        if a % each == b % each == 0
    ]
    return places[0][1] - places[0][0] if len(places) == 2 and places[0] == places[1] else None


def _slice(op: Operation) -> Kind:
    kind = op.kinds[0]
    given = [step.equation.params for step in op.steps]
    axis, rank = kind.axis, len(op.shapes[0][0])
    starts = [params["start_indices"] for params in given]
    stops = [params["limit_indices"] for params in given]
    strides = [params["strides"] or (1,) * rank for params in given]
    for at in range(rank):
        if at != axis and (
            starts[0][at] != starts[1][at]
            or stops[0][at] != stops[1][at]
            or strides[0][at] != strides[1][at]
        ):
            return op.sized
    if any(steps[axis] != 1 for steps in strides):
        return op.mixes
    start, stop = (starts[0][axis], starts[1][axis]), (stops[0][axis], stops[1][axis])
    if start == (0, 0) and stop == tuple(shape[axis] for shape in op.shapes[0]):
        return op.each(axis, kind)
    blocks = _blocks(op, start, stop, kind)
    return op.mixes if not blocks else op.each(axis, dataclasses.replace(kind, outer=blocks))


def _split(op: Operation) -> list[Kind] | Kind:
    kind, axis = op.kinds[0], op.params["axis"]
    one, two = (step.equation.params["sizes"] for step in op.steps)
    if kind.axis != axis:
        if tuple(one) != tuple(two):
            return op.sized
        return [op.each(kind.axis, kind, at) for at in range(len(op.results))]
    found: list[Kind] = []
    start = (0, 0)
    for at, sizes in enumerate(zip(one, two, strict=True)):
        stop = (start[0] + sizes[0], start[1] + sizes[1])
        blocks = _blocks(op, start, stop, kind)
        start = stop
        found.append(
            op.each(axis, dataclasses.replace(kind, outer=blocks), at) if blocks else op.mixes
        )
    return found


def _pad(op: Operation) -> Kind:
    kind = _only(op)
    if kind is None or any(op.params["padding_config"][kind.axis]):
        return op.mixes
    zero = isinstance(op.kinds[1], Free) and op.kinds[1].is_zero
    if not close(kind.growth, 1) and not zero:
        return op.sized
    return op.each(kind.axis, kind)


def _dot_general(op: Operation) -> Kind:
    if any(isinstance(kind, Flat) for kind in op.kinds) or not op.alike():
        return _dot_of_one(op) or op.sized
    contracted, batched = op.params["dimension_numbers"]
    rank = len(op.shapes[0][0])
    left, right = list(range(rank)), [rank + at for at in range(len(op.shapes[1][0]))]
    for one, two in (*zip(*contracted, strict=True), *zip(*batched, strict=True)):
        right[two] = left[one]
    rows = [left[axis] for axis in batched[0]]
    out = rows + [label for label in left if label not in right]
    return _contraction(op, left, right, out + [label for label in right if label not in left])


def _einsum(op: Operation) -> Kind:
    left, right, out = op.params["spec"].replace("->", ",").split(",")
    return _contraction(op, left, right, out)


def _contraction(op: Operation, left, right, out) -> Kind:
    """Of a product of two arrays, whose axes and those of the result have labels."""
    growth = math.prod(kind.growth for kind in op.kinds)
    labels, own = [], []
    for at, names in enumerate((left, right)):
        kind = _spread_out(op, at)
        if isinstance(kind, Each):
            labels.append(names[kind.axis])
            own.append(Each(0, kind.outer, kind.inner, growth))
    common, label = agreed(own), labels[0]
    both = label in left and label in right
    if common is None or labels != [label] * (2 if both else 1):
        return op.mixes
    if label in out:
        return op.each(list(out).index(label), common)
    return Total(growth) if both else op.mixes


def _dot_of_one(op: Operation) -> Kind | None:
    """Of a matmul whose first axis, that of the batch, is gone for one example."""
    left, right = (
        flat(kind, shapes, op.sizes) for kind, shapes in zip(op.kinds, op.shapes, strict=True)
    )
    if left is None or right is None or not op.alike("dimension_numbers"):
        return None
    (contracted, batched), (of_one, batched_of_one) = (
        step.equation.params["dimension_numbers"] for step in op.steps
    )
    growth = left.growth * right.growth
    for at, kind in enumerate((left, right)):
        (size, *rest), alone = op.shapes[at]
        fits = (
            kind.outer == 1
            and size == op.sizes[0]
            and tuple(rest) == alone
            and batched[at][:1] == (0,)
            and tuple(batched[at][1:]) == tuple(axis + 1 for axis in batched_of_one[at])
            and tuple(contracted[at]) == tuple(axis + 1 for axis in of_one[at])
        )
        if not fits:
            return None
    return Flat(1, math.prod(op.results[0][1]), growth)


def _convolution(op: Operation) -> Kind:
    kind, numbers = _only(op), op.params["dimension_numbers"]
    if kind is None or kind.axis != numbers.lhs_spec[0] or op.params["batch_group_count"] != 1:
        return op.mixes
    return op.each(numbers.out_spec[0], kind)


def _windows(op: Operation) -> Kind:
    kind = _only(op)
    if kind is None:
        return op.mixes
    neutral = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    neutral |= {"base_dilation": 1, "window_dilation": 1}
    for name, value in neutral.items():
        given = op.params.get(name)
        if given is not None and given[kind.axis] != value:
            return op.mixes
    return op.each(kind.axis, kind)


def _gather(op: Operation) -> Kind:
    (operand, indices), numbers = op.kinds, op.params["dimension_numbers"]
    if not op.alike("slice_sizes"):
        return _taken(op) or op.sized
    if isinstance(indices, Flat):
        return _taken(op) or op.mixes
    sizes = [step.equation.params["slice_sizes"] for step in op.steps]
    rank = len(op.results[0][0])
    rows = [axis for axis in range(rank) if axis not in numbers.offset_dims]  # those of indices
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    axis = operand.axis if isinstance(operand, Each) else None
    others = [(a, b) for at, (a, b) in enumerate(zip(*sizes, strict=True)) if at != axis]
    if any(a != b for a, b in others) or len(rows) != len(op.shapes[1][0]) - 1:
        return op.sized
    if isinstance(operand, Free):
        if operand.value is not None and op.shapes[0][0] != op.shapes[0][1]:
            return op.mixes
        if indices.axis >= len(rows):
            return op.mixes
        return op.each(rows[indices.axis], indices)
    if isinstance(indices, Each):
        paired = list(
            zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        )
        common = agreed([dataclasses.replace(kind, axis=0) for kind in op.kinds])
        if common is None or (operand.axis, indices.axis) not in paired:
            return op.mixes
        return op.each(rows[indices.axis], common)
    whole = tuple(size[operand.axis] for size in sizes) == tuple(
        shape[operand.axis] for shape in op.shapes[0]
    )
    if not whole or operand.axis in {*taken, *numbers.start_index_map}:
        return op.mixes
    if op.shapes[1][0] != op.shapes[1][1]:
        return op.mixes
    windows = [at for at in range(len(op.shapes[0][0])) if at not in taken]
    return op.each(numbers.offset_dims[windows.index(operand.axis)], operand)


def _taken(op: Operation) -> Kind | None:
    """Of `jnp.take_along_axis` with one index a row: for one example it is another gather."""
    operand, indices = op.kinds
    axes = {_taken_axis(op, which) for which in (0, 1)}
    if len(axes) != 1 or not op.alike("slice_sizes", "dimension_numbers"):
        return None
    (axis,) = axes
    if axis is None or not isinstance(operand, Each) or operand.axis == axis:
        return None
    rows = flat(operand, op.results[0], op.sizes)
    same = rows is not None and rows == flat(indices, op.shapes[1], op.sizes)
    return op.each(operand.axis, operand) if same else None


def _taken_axis(op: Operation, which: int) -> int | None:
    """The axis along which a gather takes elements of each row, the indices being in the order of
    the result; None: it takes something else."""
    params = op.steps[which].equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape, of_indices = op.shapes[0][which], op.shapes[1][which]
    result = op.results[0][which]
    if len(numbers.start_index_map) != 1 or set(sizes) != {1} or len(result) != len(shape):
        return None
    axis = int(numbers.start_index_map[0])
    rows = list(numbers.operand_batching_dims)
    of_rows = list(numbers.start_indices_batching_dims)
    rest = [at for at in range(len(of_indices) - 1) if at not in of_rows]
    places = [at for at in range(len(result)) if at not in numbers.offset_dims]
    fits = (
        tuple(numbers.collapsed_slice_dims) == (axis,)
        and rows == sorted(rows)
        and of_rows == sorted(of_rows)
        and all(shape[at] == 1 for at in range(len(shape)) if at != axis and at not in rows)
        and [places[at] for at in rest] == [axis]
        and all(result[at] == shape[at] for at in range(len(shape)) if at != axis)
        and math.prod(of_indices) == math.prod(result)
    )
    return axis if fits else None


def _picked(op: Operation) -> Kind | None:
    """Of a gather in which each example picks from its own part: ``x[jnp.arange(n), labels]``."""
    operand, columns = op.kinds
    numbers = op.params["dimension_numbers"]
    if not isinstance(operand, Each) or (operand.outer, operand.inner) != (1, 1):
        return None
    if (
        not close(operand.growth, 1)
        or not op.alike()
        or operand.axis not in numbers.start_index_map
    ):
        return None
    at = numbers.start_index_map.index(operand.axis)
    own, rest = columns.parts[at], columns.parts[:at] + columns.parts[at + 1 :]
    if not isinstance(own, Index) or operand.axis not in numbers.collapsed_slice_dims:
        return None
    if not all(
        (isinstance(kind, Free) and kind.value is not None)
        or (isinstance(kind, Each) and agreed([kind, Each(own.axis)]))
        for kind in rest
    ):
        return None
    rows = [axis for axis in range(len(op.results[0][0])) if axis not in numbers.offset_dims]
    return op.each(rows[own.axis], operand)


def _dynamic_slice(op: Operation) -> Kind:
    kind = _only(op)
    if kind is None or op.results[0][0][kind.axis] != op.shapes[0][0][kind.axis]:
        return op.mixes
    return op.each(kind.axis, kind)


def _dynamic_update_slice(op: Operation) -> Kind:
    own = [kind for kind in op.kinds[:2] if isinstance(kind, Each)]
    common = agreed(own)
    if common is None or not all(isinstance(kind, Free) for kind in op.kinds[2:]):
        return op.mixes
    if op.shapes[1][0][common.axis] != op.shapes[0][0][common.axis]:
        return op.mixes
    if any(isinstance(kind, Free) and kind.value is None for kind in op.kinds[:2]):
        return op.mixes
    return op.each(common.axis, common)


def _tile(op: Operation) -> Kind:
    kind = op.kinds[0]
    rank, reps = len(op.shapes[0][0]), tuple(op.params["reps"])
    if len(reps) != rank:
        return op.unknown
    return op.each(kind.axis, dataclasses.replace(kind, outer=kind.outer * reps[kind.axis]))


def _scatter(op: Operation) -> Kind:
    (operand, indices, updates), numbers = op.kinds, op.params["dimension_numbers"]
    rank = len(op.shapes[2][0])
    rows = [axis for axis in range(rank) if axis not in numbers.update_window_dims]
    growth = updates.growth
    if not close(operand.growth, growth) and not (isinstance(operand, Free) and operand.is_zero):
        return op.sized
    if not close(indices.growth, 1) or (not close(growth, 1) and op.name not in _SCATTER_ADD):
        return op.sized
    if any(
        isinstance(kind, Free) and kind.value is None and one != two
        for kind, (one, two) in zip(op.kinds, op.shapes, strict=True)
    ):
        return op.mixes
    own = [dataclasses.replace(k, axis=0) for k in op.kinds if isinstance(k, Each)]
    common = agreed(own)
    if common is None:
        return op.mixes
    common = dataclasses.replace(common, growth=growth)
    batched = list(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    of_indices = indices.axis if isinstance(indices, Each) else None
    if isinstance(updates, Each) and updates.axis in rows:
        row = rows.index(updates.axis)
        if of_indices not in (None, row):
            return op.mixes
        for axis, of_row in batched:
            if of_row == row:
                fits = not isinstance(operand, Each) or operand.axis == axis
                return op.each(axis, common) if fits else op.mixes
        summed = op.name in _SCATTER_ADD and of_indices == row and isinstance(operand, Free)
        alone = op.results[0][0] == op.results[0][1]
        return Total(growth) if summed and alone and operand.is_zero else op.mixes
    if of_indices is not None:
        for axis, of_row in batched:
            if of_row == of_indices and not isinstance(updates, Each):
                fits = not isinstance(operand, Each) or operand.axis == axis
                return op.each(axis, common) if fits else op.mixes
        return op.mixes
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [axis for axis in range(len(op.shapes[0][0])) if axis not in gone]
    pairs = list(zip(windows, numbers.update_window_dims, strict=True))
    for axis, of_update in pairs:
        if axis in numbers.scatter_dims_to_operand_dims:
            continue
        fits = op.shapes[0][0][axis] == op.shapes[2][0][of_update]
        same = not isinstance(operand, Each) or operand.axis == axis
        same = same and (not isinstance(updates, Each) or updates.axis == of_update)
        if fits and same and op.results[0][0][axis] != op.results[0][1][axis]:
            return op.each(axis, common)
    return op.mixes


def _keyed(op: Operation) -> Kind:
    """Of random numbers by a key of each example: its axes come first in the result."""
    own = [kind for kind in op.kinds if isinstance(kind, Each)]
    common = agreed(own)
    if common is None or any(isinstance(k, Free) and k.value is None for k in op.kinds):
        return op.mixes
    return op.each(common.axis, common)


def _special(op: Operation) -> Kind | None:
    """Of the numbers of the examples, and what is chosen by a known one; None: no such thing."""
    kinds, name = op.kinds, op.name
    if name == "select_n" and isinstance(kinds[0], Free) and kinds[0].value is not None:
        one, two = kinds[0].value
        chosen = kinds[1 + int(one)]
        alike = op.shapes[1 + int(one)] == op.results[0]
        if one == two and alike and isinstance(chosen, Index | Each):
            return chosen
    if name == "concatenate" and any(isinstance(kind, Index) for kind in kinds):
        last = len(op.results[0][0]) - 1
        single = all(shape[-1] == 1 for shape, _ in op.shapes)
        return Columns(tuple(kinds)) if single and op.params["dimension"] == last else None
    if name == "gather" and isinstance(kinds[1], Columns):
        return _picked(op)
    if not kinds or not isinstance(kinds[0], Index):
        return None
    if name in ("lt", "ge") and isinstance(kinds[1], Free) and kinds[1].is_zero:
        return Free(value=(name == "ge",) * 2)
    if name == "broadcast_in_dim":
        axis = op.params["broadcast_dimensions"][kinds[0].axis]
        return Index(axis) if lies(Each(axis), op.results[0], op.sizes) else None
    if name == "convert_element_type" and not op.inexact():
        return kinds[0]
    return None


_SCATTERS = (
    *("scatter", *_SCATTER_ADD, "scatter-max", "scatter-min", "scatter-mul"),
    *("scatter_max", "scatter_min", "scatter_mul"),
)
_RANDOM = frozenset("random_bits random_fold_in random_seed random_split random_wrap".split())
_PASSED = frozenset({"after", "back_together", "device_put", "optimization_barrier", "together"})
_MATRICES = frozenset("cholesky eigh householder_product lu qr svd triangular_solve".split())
# Parameters that are programs: of operations without a batch they are the same if all else is.
_CODE = ("update_jaxpr",)
# Parameters that have the size of the batch in them; the rules check the results' shapes.
_SIZES = {
    "broadcast_in_dim": ("shape", "sharding"),
    "dynamic_slice": ("slice_sizes",),
    "reshape": ("new_sizes", "sharding"),
    **dict.fromkeys(_SCATTERS, ("update_jaxpr",)),
}
_OWN_PARAMETERS = frozenset({"dot_general", "gather", "slice", "split"})

_RULES: dict[str, Callable[[Operation], Any]] = {
    **dict.fromkeys(
        ELEMENTWISE
        | {"acosh", "bessel_i0e", "bessel_i1e", "digamma", "igamma", "igammac", "imag", "mulhi"}
        | {"name", "polygamma", "random_fold_in", "zeta"},
        _elementwise,
    ),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")
    ),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "top_k": lambda op: (_along("axis") if "axis" in op.params else _last(lambda op: 1))(op),
    "fft": _last(lambda op: len(op.params["fft_lengths"])),
    **dict.fromkeys(_MATRICES, _last(lambda op: 2)),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "tile": _tile,
    "dot_general": _dot_general,
    "wide_einsum": _einsum,
    "stack": _stack,
    "unstack": _unstack,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        ("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windows
    ),
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    **dict.fromkeys(_SCATTERS, _scatter),
    **dict.fromkeys(("random_bits", "random_split", "random_wrap", "random_unwrap"), _keyed),
}  # fmt: skip


def _number(value: Any) -> Any:
    """A constant that is one number, as Python has it; None: it is none."""
    if _jax.is_opaque(value) or np.ndim(value) != 0:
        return None
    number = np.asarray(value).item()
    return number if isinstance(number, bool | int | float) else None


def _equal(one: Any, two: Any) -> bool:
    try:
        return one is two or bool(one == two)
    except (TypeError, ValueError):  # arrays and such
        return False
