"""What the leaves of an optimizer's state are, read from its own init and update.

A moment is a recurrence: its next value is made of the one before, element by element. What its
elements may be is in the same program. Names say nothing of it: `optax.sm3` calls its momentum
``nu``, and others call their second moments ``n``, ``v`` or ``exp_avg_sq``.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError

# What moves or selects elements: the result has those of its operands.
_SAME = frozenset(
    "broadcast_in_dim convert_element_type copy device_put optimization_barrier reduce_precision "
    "reshape sharding_constraint squeeze transpose".split()
)
_SUMS = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("mul", "div"))
_ELEMENTWISE = frozenset("abs cbrt clamp integer_pow max min neg pow sign sqrt square".split())
# Not a number where their operand is negative; so are powers that are not whole.
_ROOTS = frozenset("log rsqrt sqrt".split())
_AT_LEAST_ZERO = frozenset("abs exp exp2 iota logistic rsqrt sqrt square".split())
# At least zero where all their operands are.
_MONOTONE = frozenset(
    "cbrt clamp cumsum dot_general integer_pow log1p min pow reduce_max reduce_min reduce_sum "
    "select_n sign".split()
)
# What may be added to what the root is taken of, and is no more than a guard against zeros. Chosen:
# optax's largest is 1e-3.
_EPSILON = 1e-2
_CALLS = frozenset(("custom_jvp_call", "custom_vjp_call"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """What is known of a value; sets of inputs are bits of an int.

    Attributes:
        number: its own.
        depends_on: the inputs that it is computed from.
        permutes: the inputs whose elements it has, moved or changed one by one.
        modifies: those of them that it has not as they were.
        not_additive: those of them that are in it otherwise than by adding to them.
        sign_sensitive: inputs of which the rounding of each by itself may change its sign.
        at_least_zero: whether it has no negative elements.
        multiple_of: numbers of values that it is a multiple of, by something of one sign.
    """

    number: int
    depends_on: int = 0
    permutes: int = 0
    modifies: int = 0
    not_additive: int = 0
    sign_sensitive: int = 0
    at_least_zero: bool = False
    multiple_of: frozenset[int] = frozenset()


class _Analysis:
    """One walk through a program. ``large`` are the inputs that are to be rounded; ``under_roots``
    the numbers of values that an earlier walk has found to be taken the root of."""

    def __init__(self, large: int = 0, under_roots: frozenset[int] = frozenset()):
        self.large, self.known = large, under_roots
        self.count = 0
        self.under_roots: set[int] = set()
        self.sign_sensitive = 0  # what must not be rounded, or a root would be of a negative number

    def new(self, multiple_of: frozenset[int] = frozenset(), **known: Any) -> _Value:
        """A value with the next number."""
        at, self.count = self.count, self.count + 1
        return _Value(at, multiple_of=multiple_of | {at}, **known)

    def is_at_least_zero(self, value: _Value) -> bool:
        """Whether a value has no negative elements: what an optimizer takes the root of has none,
        or it would be not a number without any rounding."""
        return value.at_least_zero or value.number in self.known

    def run(self, flat: jaxprs.FlatJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """The results of a program."""
        values = dict(enumerate([*(self._constant(one) for one in flat.consts), *arguments]))

        def read(operand) -> _Value:
            return values[operand] if isinstance(operand, int) else self._constant(operand.val)

        for step in flat.steps:
            operands = [read(operand) for operand in step.inputs]
            values.update(zip(step.outputs, self._results(flat, step, operands), strict=True))
        return [read(output) for output in flat.outputs]

    def _constant(self, value: Any) -> _Value:
        known = not isinstance(value, jax.core.Tracer) and not jaxprs.is_opaque(value)
        return self.new(at_least_zero=known and bool(np.all(np.asarray(value) >= 0)))

    def _results(self, flat, step, operands: list[_Value]) -> list[_Value]:
        if step.primitive == "cond" and (branches := jaxprs.branches_of(step.equation)):
            each = [self.run(branch, operands[1:]) for branch in branches]
            return [self._any_of(operands[0], cases) for cases in zip(*each, strict=True)]
        if step.primitive in _CALLS or jaxprs.is_region(step.equation):
            return self.run(jaxprs.called_jaxpr(step.equation), operands)
        if len(step.outputs) == 1:
            sizes = [flat.aval(one).size for one in (*step.inputs, *step.outputs)]
            return [self._result(step, operands, sizes)]
        if step.primitive in _SAME:  # of several
            return [self._any_of(None, (one,)) for one in operands]
        return [
            self.new(depends_on=_union(one.depends_on for one in operands)) for _ in step.outputs
        ]

    def _any_of(self, predicate: _Value | None, cases: Sequence[_Value]) -> _Value:
        of = _union(one.depends_on for one in cases)
        return self.new(
            depends_on=of if predicate is None else of | predicate.depends_on,
            permutes=_union(one.permutes for one in cases),
            modifies=_union(one.modifies for one in cases),
            not_additive=_union(one.not_additive for one in cases),
            sign_sensitive=_union(one.sign_sensitive for one in cases),
            at_least_zero=all(map(self.is_at_least_zero, cases)),
        )

    def _result(self, step, operands: list[_Value], sizes: list[int]) -> _Value:
        name = step.primitive
        if name == "select_n":
            return self._any_of(operands[0], operands[1:])
        if _is_root(step):
            self.under_roots.update(operands[0].multiple_of)
            self.sign_sensitive |= operands[0].sign_sensitive
        permutes = modifies = not_additive = 0
        if name in _SAME | _SUMS | _PRODUCTS | _ELEMENTWISE:
            same = [one for one, size in zip(operands, sizes, strict=False) if size == sizes[-1]]
            permutes = _union(one.permutes for one in same)
            modifies = _union(one.modifies for one in same) if name in _SAME else permutes
            adds = name in _SAME | _SUMS
            not_additive = _union(one.not_additive for one in same) if adds else permutes
        at_least_zero = _is_at_least_zero(step, operands, sizes)
        sign_sensitive = 0 if at_least_zero else _union(one.sign_sensitive for one in operands)
        if name in _SUMS and not at_least_zero:
            left, right = (one.depends_on & self.large for one in operands)
            if left and right and (left | right).bit_count() > 1:
                sign_sensitive |= left | right
        return self.new(
            depends_on=_union(one.depends_on for one in operands),
            permutes=permutes,
            modifies=modifies,
            not_additive=not_additive,
            sign_sensitive=sign_sensitive,
            at_least_zero=at_least_zero,
            multiple_of=_multiple_of(step, operands, sizes),
        )


def _is_root(step: jaxprs.FlatStep) -> bool:
    """Whether it is not a number where its operand is negative."""
    if step.primitive != "pow":
        return step.primitive in _ROOTS
    return bool(np.any(np.mod(_number(step, 1, 1.0), 1)))


def _number(step: jaxprs.FlatStep, at: int, otherwise: Any) -> Any:
    """An operand that is written in the program; what it is otherwise."""
    operand = step.inputs[at]
    return otherwise if isinstance(operand, int) else operand.val


def _is_at_least_zero(step: jaxprs.FlatStep, operands: list[_Value], sizes: list[int]) -> bool:
    name = step.primitive
    if name in _AT_LEAST_ZERO or jnp.issubdtype(step.equation.outvars[0].aval.dtype, jnp.bool_):
        return True
    if name == "integer_pow" and step.equation.params["y"] % 2 == 0:
        return True
    if name == "mul" and step.inputs[0] == step.inputs[1]:
        return True
    if name == "max":
        return any(one.at_least_zero for one in operands)
    if name == "sub":  # what a decay rate leaves of one
        return sizes == [1, 1, 1] and bool(_number(step, 0, 0) == 1)
    return name in _SAME | _MONOTONE | _PRODUCTS | {"add", "add_any"} and all(
        one.at_least_zero for one in operands
    )


def _multiple_of(step: jaxprs.FlatStep, operands: list[_Value], sizes: list[int]) -> frozenset[int]:
    """Numbers of the values that the result is a multiple of, by something of one sign: what an
    array is divided by to correct a bias, or an epsilon that is added to it, counts as that."""
    name = step.primitive
    if name in _SAME:
        return operands[0].multiple_of
    if name not in ("mul", "div", "add") or sizes[2] == 1:
        return frozenset()
    for scalar, array in ((1, 0), (0, 1)) if name != "div" else ((1, 0),):
        number = _number(step, scalar, 0)
        small = number <= _EPSILON if name == "add" else True
        if sizes[scalar] == 1 and number >= 0 and small:
            return operands[array].multiple_of
    return frozenset()


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


@dataclasses.dataclass(frozen=True)
class StateAnalysis:
    """The leaves of an optimizer's state, by their paths.

    Attributes:
        shapes: the state, its leaves as shapes and dtypes.
        moments: those that may be rounded.
        sums: those of them that are only added to, where what is small beside them must not be
            lost.
        second: those of them that have no negative elements, such as means of squares.
    """

    shapes: Any
    moments: frozenset[tuple]
    sums: frozenset[tuple]
    second: frozenset[tuple]


def analyze_state(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    large: Callable[[tuple, Any], bool],
) -> StateAnalysis:
    """Reads what the leaves of an optimizer's state are; ``large(path, leaf)`` says which are to be
    rounded. Not those that begin as the parameters' values or are made of no gradients (averages of
    parameters), nor those that are no recurrence (the last gradient, the pairs of L-BFGS), nor
    those of which a root takes the difference (the two of `optax.rmsprop(centered=True)`): it would
    be of a negative number.

    Raises:
        JaxmemError: the update asks for arguments that are not known before it is called.
    """
    leaves, tree = jax.tree.flatten(params)
    begin = jaxprs.flatten(lambda *leaves: optimizer.init(jax.tree.unflatten(tree, leaves)), leaves)
    reading = _Analysis()
    first = reading.run(begin, [reading.new(depends_on=1) for _ in leaves])

    state = [_like(begin.aval(one)) for one in begin.outputs]
    shapes = jax.tree.unflatten(begin.out_tree, state)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    rounded = [
        not begins.depends_on and large(path, leaf)
        for begins, path, leaf in zip(first, paths, state, strict=True)
    ]
    if not any(rounded):
        return StateAnalysis(shapes, frozenset(), frozenset(), frozenset())

    update = _traced(optimizer, params, shapes)
    never_negative = {
        at for at, one in enumerate(first) if one.at_least_zero and not one.depends_on
    }
    under_roots: frozenset[int] = frozenset()
    while True:
        reading = _Analysis(_union(one << at for at, one in enumerate(rounded)), under_roots)
        arguments = [
            reading.new(depends_on=1 << at, permutes=1 << at, at_least_zero=at in never_negative)
            for at in range(len(state))
        ]
        arguments += [reading.new() for _ in leaves]
        arguments += [reading.new(depends_on=1 << len(state)) for _ in leaves]
        results = reading.run(update, [*arguments, reading.new()])
        after = results[-len(state) :]
        before, seen = never_negative, under_roots
        under_roots = frozenset(reading.under_roots)
        never_negative = {
            at
            for at, one in enumerate(after)
            if not under_roots.isdisjoint((at, one.number)) or (at in before and one.at_least_zero)
        }
        if (never_negative, under_roots) == (before, seen):
            break
    moments = {
        at
        for at, one in enumerate(after)
        if rounded[at] and one.modifies >> at & 1 and one.depends_on >> len(state) & 1
        if not reading.sign_sensitive >> at & 1
    }
    sums = {at for at in moments if not after[at].not_additive >> at & 1}
    kinds = (moments, sums, moments & never_negative)
    return StateAnalysis(shapes, *(frozenset(paths[at] for at in kind) for kind in kinds))


def _traced(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, state: Any
) -> jaxprs.FlatJaxpr:
    """One update, as a program of the state and of what else it takes, in this order. Line searches
    and those that go by the loss get what `jaxmem.train_step` gives them."""
    params = jax.tree.map(lambda leaf: _like(jax.typeof(leaf)), params)
    leaves, tree = jax.tree.flatten((state, params, params, jax.ShapeDtypeStruct((), jnp.float32)))

    def call(given: frozenset[str]) -> Callable:
        def update(*leaves):
            state, params, gradients, value = jax.tree.unflatten(tree, leaves)
            known = {"value": value, "grad": gradients, "value_fn": _sum}
            extra = {name: known[name] for name in known.keys() & given}
            return optimizer.update(gradients, state, params, **extra)

        return update

    for given in (("value", "grad", "value_fn"), ("value",), ()):
        try:
            return jaxprs.flatten(call(frozenset(given)), leaves)
        except (TypeError, ValueError) as error:
            raised = error
    raise JaxmemError(
        "jaxmem.optim.small_moments reads from the optimizer's update what its state holds, and "
        f"that raised {type(raised).__name__}: {raised} It gives gradients like the parameters, "
        "value=, grad= and value_fn=. Wrap the part with the moments: of a chain its link, of a "
        "wrapper what it is around."
    ) from raised


def _like(aval) -> jax.ShapeDtypeStruct:
    """Shape, dtype and explicit axes of an abstract value, in the memory where it is."""
    if jaxprs.memory_space(aval) is jaxprs.HOST:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=jaxprs.host_sharding())
    return jaxprs.struct_of(aval)


def _sum(params: Any) -> jax.Array:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))
