"""Whether a loss is the mean of its examples' losses, told from its program.

Microbatches add up gradients of slices as parts of a mean. That is exact for a mean over examples
that do not see one another, and for nothing else: a sum, a mean over what a mask leaves, batch
norm. The loss is traced at two sizes of the batch. A value that is made of the batch and has
another shape in the second trace has the examples in it; one of the same shape sums them up, and
may go on to the loss in a straight line, divided once by a number that grows with the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _jax

# What a value is made of. Anything else is a text: why nothing can be said of it.
_FIXED, _EXAMPLES, _SUM, _MEAN = "nothing of the batch", "examples", "a sum", "a mean"
_KINDS = (_FIXED, _EXAMPLES, _SUM, _MEAN)

_STRAIGHT = frozenset(
    """
    broadcast_in_dim concatenate convert_element_type copy neg optimization_barrier
    reduce_precision reduce_sum reshape sharding_constraint squeeze transpose
    """.split()
)


class _MixedError(Exception):
    """Examples see one another."""


def why_no_mean(loss: Callable, batch: Any, *args: Any) -> str | None:
    """Why ``loss(batch, *args)``, a scalar, is no mean over the examples of the batch (its arrays'
    first axis), as far as can be told; None: it is one. Arguments may be abstract."""

    def trace(times: int) -> _jax.FlatJaxpr:
        def enlarge(leaf):
            return jax.ShapeDtypeStruct((times * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)

        leaves, call = _jax.split_arrays(loss, (jax.tree.map(enlarge, batch), *args), {})
        return _jax.flatten(call, leaves, open_regions=True)

    try:
        flats = trace(1), trace(2)
    except (TypeError, ValueError) as error:
        return f"it cannot be traced with twice the batch ({str(error).splitlines()[0]})"
    count = len(jax.tree.leaves(batch))
    first = flats[0].input_count - len(jax.tree.leaves((batch, *args)))
    given = [
        _EXAMPLES if first <= at < first + count else _FIXED for at in range(flats[0].input_count)
    ]
    try:
        (kind,) = _Pair(*flats).kinds(given)
    except _MixedError as error:
        return f"its examples see one another ({error})"
    if kind == _SUM:
        return "it is a sum over examples, not a mean"
    return None if kind in _KINDS else f"it is no plain mean over examples ({kind})"


class _Pair:
    """One program at two sizes of the batch, the second of twice as many examples."""

    def __init__(self, flat: _jax.FlatJaxpr, larger: _jax.FlatJaxpr):
        self.flats = flat, larger
        needed, others = _needed(flat), _needed(larger)
        self.alike = [step.primitive for step in needed] == [step.primitive for step in others]
        self.steps = list(zip(needed, others, strict=True)) if self.alike else []
        self.numbers: tuple[dict, dict] = ({}, {})  # the scalars that are known
        for flat, numbers in zip(self.flats, self.numbers, strict=True):
            numbers.update((at, value) for at, value in enumerate(flat.consts) if _is_number(value))

    def kinds(self, given: Sequence[str]) -> list[str]:
        """Of what its results are made, for that of its inputs."""
        first, larger = self.flats
        if not self.alike:
            return ["its program is another with twice the batch"] * len(first.outputs)
        found = dict(enumerate(given))
        for step, other in self.steps:
            operands = [found.get(v, _FIXED) if isinstance(v, int) else _FIXED for v in step.inputs]
            if all(kind == _FIXED for kind in operands):
                self.evaluate(step, other)
                continue
            shapes = [
                (first.avals[one].shape, larger.avals[two].shape)
                for one, two in zip(step.outputs, other.outputs, strict=True)
            ]
            results = self.called(step, other, operands, shapes)
            for value, (one, two), kind in zip(step.outputs, shapes, results, strict=True):
                if one != two:
                    summed = any(kind not in (_FIXED, _EXAMPLES) for kind in operands)
                    if summed or sum(a != b for a, b in zip(one, two, strict=True)) > 1:
                        raise _MixedError(f"{step.primitive} at {step.line}")
                    found[value] = _EXAMPLES
                else:
                    found[value] = kind or self.summed(step, other, operands)
        return [found.get(v, _FIXED) if isinstance(v, int) else _FIXED for v in first.outputs]

    def evaluate(self, step: _jax.Step, other: _jax.Step) -> None:
        """A number made of known ones is known."""
        for flat, each, numbers in zip(self.flats, (step, other), self.numbers, strict=True):
            small = all(flat.avals[value].shape == () for value in each.outputs)
            if small and all(value in numbers for value in each.uses):
                flat.run([each], numbers)

    def called(self, step, other, operands: list[str], shapes) -> list[str]:
        """The kinds that the program inside of a loop or a custom rule tells; "" where none does
        or none is needed."""
        unknown = [""] * len(shapes)
        name = step.primitive
        if name == "scan":
            one, two = _jax.loop_of(step.equation), _jax.loop_of(other.equation)
            if one.options["length"] != two.options["length"]:
                return unknown
            pair, carry = _Pair(one.body, two.body), slice(0, one.carry.stop - one.carry.start)
            given = [*[_FIXED] * len(one.body.consts), *operands]
            start = len(given) - len(operands) + one.carry.start
            for _ in _KINDS:  # what is carried may become another kind each time
                results = pair.kinds(given)
                joined = list(map(_join, given[start:], results[carry]))
                if given[start : start + len(joined)] == joined:
                    return results
                given[start : start + len(joined)] = joined
            return unknown
        if name.startswith("custom_") and any(one == two for one, two in shapes):
            called = [_jax.called_jaxpr(each.equation) for each in (step, other)]
            return _Pair(*called).kinds([*[_FIXED] * len(called[0].consts), *operands])
        return unknown

    def summed(self, step: _jax.Step, other: _jax.Step, operands: list[str]) -> str:
        """The kind of a result that has no examples in it any more."""
        name, made = step.primitive, {kind for kind in operands if kind != _FIXED}
        for kind in made:
            if kind not in _KINDS:
                return kind
        why = f"{name} at {step.line}"
        if made == {_EXAMPLES}:
            return _SUM if name in ("reduce_sum", "dot_general") else why
        if len(made) > 1:
            return why
        kind = made.pop()
        if name in _STRAIGHT or (name in ("add", "sub", "add_any") and kind == _MEAN):
            return kind
        if name in ("add", "sub", "add_any") and _FIXED not in operands:
            return kind
        if name == "mul" and operands.count(kind) == 1:
            return self.scaled(kind, self.growth(step, other, operands.index(_FIXED)), why)
        if name == "div" and operands[0] == kind and operands[1] == _FIXED:
            return self.scaled(kind, 1 / self.growth(step, other, 1), why)
        return why

    def growth(self, step: _jax.Step, other: _jax.Step, at: int) -> float:
        """How many times larger a factor is with twice the examples; 1 if it is not known."""
        found = []
        for each, numbers in zip((step, other), self.numbers, strict=True):
            operand = each.inputs[at]
            value = numbers.get(operand) if isinstance(operand, int) else operand.val
            found.append(value if _is_number(value) else None)
        one, two = found
        return float(two / one) if one is not None and two is not None and one != 0 else 1.0

    def scaled(self, kind: str, growth: float, why: str) -> str:
        if abs(growth - 1) < 1e-6:
            return kind
        return _MEAN if kind == _SUM and abs(growth - 0.5) < 1e-6 else why


def _needed(flat: _jax.FlatJaxpr) -> list[_jax.Step]:
    """The steps that the results are made of: metrics beside a loss may be anything."""
    wanted = {value for value in flat.outputs if isinstance(value, int)}
    found = []
    for step in reversed(flat.steps):
        if not wanted.isdisjoint(step.outputs):
            wanted.update(step.uses)
            found.append(step)
    return found[::-1]


def _join(before: str, after: str) -> str:
    return after if before == _FIXED else before if after in (_FIXED, before) else after


def _is_number(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        return False
    return isinstance(value, int | float | np.generic | np.ndarray | jax.Array) and (
        np.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.number)
    )
