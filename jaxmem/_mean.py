"""Whether a loss is a mean, or a sum, over examples: proved from its program, or not.

Microbatches add up gradients of slices. That is exact for a mean, or a sum, over examples that do
not see one another, and for nothing else. The loss is traced for the whole batch and for a slice;
both programs are walked together, and `jaxmem._examples` tells what each operation makes of the
examples. What it cannot tell is not proved, and the reason names the operation and its line.

The derivative needs no proof of its own: where the loss is such a sum, its derivative is one, by
the chain rule. But for a function with a derivative rule of the user's: the rule is traced, and
walked too.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import _jax
from jaxmem._examples import (
    Each,
    Flat,
    Free,
    Index,
    Kind,
    Operation,
    Total,
    Unproved,
    agreed,
    close,
    constant,
    flat,
    lies,
    mean_growth,
    results as plain_results,
    shaped,
)


class Proof(NamedTuple):
    """``reduction`` is ``"mean"`` or ``"sum"``, or None where ``why`` says what is in the way."""

    reduction: str | None
    why: str = ""


def reduction_of(
    loss: Callable,
    batch: Any,
    slices: Collection[int],
    params: Any,
    model_state: Any = None,
    key: Any = None,
) -> Proof:
    """What a loss is over the examples of a batch, the first axis of its arrays.

    Args:
        loss: ``loss(params, batch, model_state, key)``, a scalar and the new model state.
        batch: arrays, real or abstract, as all arguments may be.
        slices: the sizes of slices for which that is to hold.
        params, model_state, key: as for the loss; from ``key`` each slice draws other numbers.
    """
    leaves = jax.tree.leaves(batch)
    shapes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(shapes) != 1 or () in shapes:
        return Proof(None, "the arrays of the batch have no first axis of examples in common")
    ((size,),) = shapes
    found = Proof("mean")
    whole: _jax.FlatJaxpr | None = None
    for part in sorted(set(slices) - {size}):
        try:
            whole = whole or _traced(loss, size, batch, params, model_state, key)
            sliced = _traced(loss, part, batch, params, model_state, key)
        except Exception as error:
            said = f"it cannot be traced with a slice of the batch ({_first_line(error)})"
            return Proof(None, said)
        proof = _compared(whole, sliced, (size, part), (batch, params, model_state, key))
        if proof.reduction is None:
            return proof
        found = proof
    return found


def _traced(loss, size, batch, params, model_state, key) -> _jax.FlatJaxpr:
    def resized(leaf):
        return jax.ShapeDtypeStruct((size, *jnp.shape(leaf)[1:]), jnp.result_type(leaf))

    def call(batch, params, model_state, key):
        return loss(params, batch, model_state, key)

    arguments = jax.tree.map(resized, batch), params, model_state, key
    leaves, call = _jax.split_arrays(call, arguments, {})
    return _jax.flatten(call, leaves, open_regions=True)


def _compared(whole, sliced, sizes: tuple[int, int], arguments: tuple) -> Proof:
    batch, params, state, key = (
        [leaf for leaf in jax.tree.leaves(part) if _jax.is_array(leaf)] for part in arguments
    )
    count = len(batch) + len(params)
    first = whole.input_count - count - len(state) - len(key)
    start = first + count
    state_numbers = range(start, start + len(state))
    new_state = whole.outputs[1 : 1 + len(state)]
    given: list[Kind] = [*[Each(0)] * len(batch), *[Free()] * len(params)]
    for number, new in zip(state_numbers, new_state, strict=True):
        given.append(_of_state(whole.avals[number], changed=new != number))
    given += [Free(drawn=True)] * len(key)
    found = Walk(whole, sliced, sizes).kinds(given)
    if isinstance(found[0], Unproved):
        return Proof(None, found[0].why)
    for number, new, kind in zip(state_numbers, new_state, found[1:], strict=True):
        if new == number:
            continue
        exact = not jnp.issubdtype(whole.avals[number].dtype, jnp.inexact)
        if not (exact and isinstance(kind, Free)):
            why = kind.why if isinstance(kind, Unproved) else "each slice changes it"
            return Proof(None, f"its model state is made from the batch: {why}")
    return _told(found[0], sizes)


def _of_state(aval, changed: bool) -> Free:
    """Of a model state: what a step changes is another in each slice, and a key draws others."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return Free(drawn=changed)
    return Free(moved=changed)


def _told(kind: Kind, sizes: tuple[int, int]) -> Proof:
    if isinstance(kind, Free) and close(kind.growth, 1):
        moved = "it uses a model state that each slice changes"
        return Proof(None, moved) if kind.moved else Proof("mean")
    if isinstance(kind, Total) and close(kind.growth, mean_growth(sizes)):
        return Proof("mean")
    if isinstance(kind, Total) and close(kind.growth, 1):
        return Proof("sum")
    return Proof(None, "it divides the sum over its examples by another number than theirs")


class Walk:
    """One program, traced for a batch and for a slice.

    ``differentiated`` is whether custom rules will be used: not in a derivative itself.
    """

    def __init__(
        self,
        whole: _jax.FlatJaxpr,
        sliced: _jax.FlatJaxpr,
        sizes: tuple[int, int],
        differentiated: bool = True,
    ):
        self.flats, self.sizes, self.differentiated = (whole, sliced), sizes, differentiated
        self.consts = [constant(*pair) for pair in zip(whole.consts, sliced.consts, strict=False)]
        self.steps = _needed(whole), _needed(sliced)

    def kinds(self, given: Sequence[Kind]) -> list[Kind]:
        """Of its results, for those of its inputs."""
        whole, sliced = self.flats
        outputs = len(whole.outputs)
        if len(whole.consts) != len(sliced.consts) or outputs != len(sliced.outputs):
            return [_ANOTHER] * outputs
        inputs = enumerate([*self.consts, *given])
        found: dict[tuple[int, int], Kind] = {(number, number): kind for number, kind in inputs}
        ones, twos = self.steps[0][::-1], self.steps[1][::-1]
        while ones or twos:
            same = bool(ones and twos) and _same_form(ones[-1], twos[-1])
            if same and _is_known(found, ones[-1], twos[-1]):
                self.step(found, ones.pop(), twos.pop())
            elif ones and ones[-1].primitive in _SHAPES:
                self.shape_alone(found, ones.pop(), 0)
            elif twos and twos[-1].primitive in _SHAPES:
                self.shape_alone(found, twos.pop(), 1)
            else:
                step = (ones or twos)[-1]
                return [Unproved(f"{_ANOTHER.why} ({step.primitive} at {step.line})")] * outputs
        pairs = zip(whole.outputs, sliced.outputs, strict=True)
        return [_read(found, *pair) for pair in pairs]

    def step(self, found: dict, one: _jax.Step, two: _jax.Step) -> None:
        """One equation of both programs."""
        steps = one, two
        kinds = [_read(found, *pair) for pair in _pairs(steps, "inputs")]
        shapes, results = self.shapes(steps, "inputs"), self.shapes(steps, "outputs")
        operation = Operation(steps, kinds, shapes, results, self.sizes)
        found.update(zip(_pairs(steps, "outputs"), self.results(operation), strict=True))

    def shape_alone(self, found: dict, step: _jax.Step, side: int) -> None:
        """A change of shape that only one of the programs has: for one example it may be none."""
        for pair, kind in list(found.items()):
            if pair[side] != step.inputs[0]:
                continue
            (shapes,) = self.shapes(([pair[0]], [pair[1]]))
            after = tuple(self.flats[side].avals[step.outputs[0]].shape)
            new = (after, shapes[1]) if side == 0 else (shapes[0], after)
            made: Kind | None = None
            if math.prod(after) == math.prod(shapes[side]) and _keeps_order(step):
                elements = flat(kind, shapes, self.sizes)
                made = elements and shaped(elements, new, self.sizes)
            elif side == 0 and len(after) == len(shapes[1]):  # what widens nothing for one example
                (made,) = plain_results(
                    Operation((step, step), [kind], [shapes], [new], self.sizes)
                )
            if made is not None and not isinstance(made, Unproved):
                number = step.outputs[0]
                found[(number, pair[1]) if side == 0 else (pair[0], number)] = made

    def shapes(self, steps, which: str = ""):
        """Of the operands or results of two steps, or of two lists of values."""

        def shape(flat, value):
            return tuple(flat.avals[value].shape if isinstance(value, int) else value.aval.shape)

        whole, sliced = self.flats
        pairs = _pairs(steps, which) if which else zip(*steps, strict=True)
        return [(shape(whole, one), shape(sliced, two)) for one, two in pairs]

    # ---- programs inside

    def results(self, operation: Operation) -> list[Kind]:
        name = operation.name
        rule = _INSIDE.get(name)
        if rule is None and _jax.is_region(operation.steps[0].equation):
            rule = Walk.called
        if rule is None:
            return plain_results(operation)
        found = rule(self, operation)
        for at, kind in enumerate(found):
            if isinstance(kind, Each) and not lies(kind, operation.results[at], self.sizes):
                found[at] = operation.mixes
            grows = operation.results[at][0] != operation.results[at][1]
            known = isinstance(kind, Free) and kind.value is not None
            if grows and not known and isinstance(kind, Free | Total):
                found[at] = operation.mixes
        return found

    def inner(self, flats: Sequence[Any]) -> "Walk":
        whole, sliced = flats
        return Walk(whole, sliced, self.sizes, self.differentiated)

    def called(self, operation: Operation) -> list[Kind]:
        """Of a program that is called as it is."""
        flats = [_jax.called_jaxpr(step.equation) for step in operation.steps]
        return self.inner(flats).kinds(operation.kinds)

    def branched(self, operation: Operation) -> list[Kind]:
        """Of a cond: the branch must be the same for all examples."""
        index, *kinds = operation.kinds
        if isinstance(index, Unproved):
            return [index] * len(operation.results)
        if not isinstance(index, Free) or not close(index.growth, 1) or index.moved:
            return [operation.mixes] * len(operation.results)
        both = [_jax.branches_of(step.equation) for step in operation.steps]
        if None in both:
            return [operation.unknown] * len(operation.results)
        found = [self.inner(flats).kinds(kinds) for flats in zip(*both, strict=True)]
        return [
            functools.reduce(functools.partial(join, sizes=self.sizes), each)
            for each in zip(*found, strict=True)
        ]

    def looped(self, operation: Operation) -> list[Kind]:
        """Of a scan or a while loop."""
        loops = [_jax.loop_of(step.equation) for step in operation.steps]
        one, two = loops
        if one.condition is None and one.options["length"] != two.options["length"]:
            return self.mapped(operation, loops)
        if (one.options, one.carry) != (two.options, two.carry):
            return [operation.sized] * len(operation.results)
        count = one.carry.stop - one.carry.start if one.condition is None else None
        body = self.inner([loop.body for loop in loops])
        consts = operation.kinds[one.body_consts]
        carry = operation.kinds[one.carry]
        slices = [_of_slice(kind) for kind in operation.kinds[one.carry.stop :]]
        if one.condition is not None:
            slices = []
        for _ in range(8):  # what is carried may become another kind each time
            found = body.kinds([*consts, *carry, *slices])
            joined = [
                join(before, after, sizes=self.sizes)
                for before, after in zip(carry, found[:count], strict=True)
            ]
            if joined == carry:
                break
            carry = joined
        else:
            return [operation.bends] * len(operation.results)
        if one.condition is None:
            return [*carry, *map(_stacked, found[count:])]
        condition = self.inner([loop.condition for loop in loops])
        (goes_on,) = condition.kinds([*operation.kinds[one.condition_consts], *carry])
        if isinstance(goes_on, Free) and close(goes_on.growth, 1) and not goes_on.moved:
            return list(carry)
        why = goes_on if isinstance(goes_on, Unproved) else operation.mixes
        return [why] * len(operation.results)

    def mapped(self, operation: Operation, loops) -> list[Kind]:
        """Of a scan along the examples: each is on its own if nothing is carried."""
        one, two = loops
        kinds, consts = operation.kinds, operation.kinds[one.body_consts]
        for kind in kinds:
            if isinstance(kind, Unproved):
                return [kind] * len(operation.results)
        own = [kind for kind in kinds[one.carry.stop :] if isinstance(kind, Each)]
        common = agreed(own) if own else None
        rest = [*consts, *(kind for kind in kinds[one.carry.stop :] if kind not in own)]
        alone = one.carry.start == one.carry.stop
        alone = alone and {**one.options, "length": 0} == {**two.options, "length": 0}
        if common is None or common.axis or not close(common.growth, 1):
            return [operation.mixes] * len(operation.results)
        if not alone or any(
            not isinstance(kind, Free) or not close(kind.growth, 1) or kind.moved for kind in rest
        ):
            return [operation.mixes] * len(operation.results)
        body = self.inner([loop.body for loop in loops])
        given = [Free() if isinstance(kind, Each) else kind for kind in kinds]
        return [
            common if isinstance(kind, Free) and close(kind.growth, 1) and not kind.moved
            else kind if isinstance(kind, Unproved) else operation.sized
            for kind in body.kinds(given)
        ]  # fmt: skip

    # ---- derivative rules of the user's

    def custom(self, operation: Operation) -> list[Kind]:
        """Of a function with a derivative rule."""
        if _trusted(operation):
            return _by_rows(operation)
        plain = self.called(operation)
        if not self.differentiated or any(isinstance(kind, Unproved) for kind in plain):
            return plain
        derivative = self.tangents if "jvp" in operation.name else self.cotangents
        why = derivative(operation, plain)
        if why is None:
            return plain
        return [Unproved(f"{why} (in the derivative rule of {operation.where})")] * len(plain)

    def derived(self, trace: Callable[[int], _jax.FlatJaxpr], given: list[Kind]) -> list[Kind]:
        """Of the results of a derivative; ``trace`` makes its program in either trace."""
        try:
            flats = trace(0), trace(1)
        except Exception as error:  # whatever the user's rule raises
            return [Unproved(f"it cannot be traced: {_first_line(error)}")]
        return Walk(*flats, self.sizes, differentiated=False).kinds(given)

    def tangents(self, operation: Operation, plain: list[Kind]) -> str | None:
        """What is wrong with a rule for tangents, which is linear in them anyway."""
        at, outputs = _real(operation)
        if not at:
            return None

        def trace(which: int) -> _jax.FlatJaxpr:
            def pushed(*values):
                call, chosen = _call(operation, which, values, at)
                tangents = jax.jvp(call, tuple(chosen), values[len(operation.kinds) :])[1]
                return [tangents[index] for index in outputs]

            avals = _avals(operation, which)
            return _jax.flatten(pushed, [*avals, *(avals[index] for index in at)])

        tangents = [_tangent(operation.kinds[index], operation.shapes[index]) for index in at]
        found = self.derived(trace, [*operation.kinds, *tangents])
        return _first_unlike(found, [plain[index] for index in outputs])

    def cotangents(self, operation: Operation, plain: list[Kind]) -> str | None:
        """What is wrong with a rule for cotangents: it must be linear in them, for those of a
        slice are larger than those of the batch."""
        at, outputs = _real(operation)
        if not at:
            return None

        def trace(which: int) -> _jax.FlatJaxpr:
            def pulled(*values):
                call, chosen = _call(operation, which, values, at)

                def of_real(*chosen):
                    results = call(*chosen)
                    return [results[index] for index in outputs]

                results, pull = jax.vjp(of_real, *chosen)
                return results, pull(list(values[len(operation.kinds) :]))

            variables = operation.steps[which].equation.outvars
            avals = [_abstract(variables[index].aval) for index in outputs]
            return _jax.flatten(pulled, [*_avals(operation, which), *avals])

        # Any growth that no other number has: it must come out as it went in.
        growth = mean_growth(self.sizes) * 0.7310585786300049
        given = [_cotangent(plain[index], growth) for index in outputs]
        found = self.derived(trace, [*operation.kinds, *given])
        expected = [_cotangent(operation.kinds[index], growth) for index in at]
        return _first_unlike(found, [*(plain[index] for index in outputs), *expected])


_INSIDE: dict[str, Callable[[Walk, Operation], list[Kind]]] = {
    **dict.fromkeys(("closed_call", "core_call", "jit", "pjit"), Walk.called),
    "cond": Walk.branched,
    **dict.fromkeys(("scan", "while"), Walk.looped),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), Walk.custom),
}


def join(before: Kind, after: Kind, *, sizes: tuple[int, int]) -> Kind:
    """The kind of what may be of either."""
    if before == after:
        return before
    for kind in (before, after):
        if isinstance(kind, Unproved):
            return kind
    if isinstance(before, Free) and isinstance(after, Free):
        if not (close(before.growth, 1) and close(after.growth, 1)):
            return Unproved("it depends on the size of the batch in a loop or a branch")
        return Free(drawn=before.drawn and after.drawn, moved=before.moved or after.moved)
    if isinstance(after, Free):
        before, after = after, before
    if isinstance(before, Free) and isinstance(after, Each | Total):
        mean = isinstance(after, Total) and close(after.growth, mean_growth(sizes))
        fits = mean or (isinstance(after, Each) and close(after.growth, 1))
        if before.is_zero or (fits and close(before.growth, 1) and not before.moved):
            return after
    if isinstance(before, Each) and isinstance(after, Each):
        common = agreed([before, after])
        if common is not None and close(before.growth, after.growth):
            return common
    if (
        isinstance(before, Total)
        and isinstance(after, Total)
        and close(before.growth, after.growth)
    ):
        return before
    return Unproved("a loop or a branch makes other things of its examples each time")


def _of_slice(kind: Kind) -> Kind:
    """Of one slice along the first axis, which is not that of the examples."""
    return _moved(kind, -1)


def _stacked(kind: Kind) -> Kind:
    return _moved(kind, 1)


def _moved(kind: Kind, by: int) -> Kind:
    """With the axis of the examples elsewhere."""
    if isinstance(kind, Each):
        return Each(kind.axis + by, kind.outer, kind.inner, kind.growth)
    if isinstance(kind, Index):
        return Index(kind.axis + by)
    return _ANOTHER if isinstance(kind, Flat) else kind


def _tangent(kind: Kind, shapes) -> Kind:
    """Of the tangent of a value."""
    if isinstance(kind, Free):
        return Free(value=(0.0, 0.0)) if shapes[0] != shapes[1] else Free()
    return kind


def _cotangent(kind: Kind, growth: float) -> Kind:
    """Of the cotangent of a value, which has this growth where the value has none."""
    if isinstance(kind, Each):
        return Each(kind.axis, kind.outer, kind.inner, growth / kind.growth)
    if isinstance(kind, Free):
        return Total(growth / kind.growth)
    return Free(growth / kind.growth) if isinstance(kind, Total) else _ANOTHER


def _first_unlike(found: list[Kind], expected: list[Kind]) -> str | None:
    whys = (_unlike(*pair) for pair in zip(found, expected, strict=False))
    return next((why for why in whys if why is not None), None)


def _unlike(found: Kind, expected: Kind) -> str | None:
    """Why a value is not of the kind that it should be of."""
    if isinstance(found, Unproved):
        return found.why
    if isinstance(found, Free) and found.is_zero:
        return None
    if isinstance(found, Each) and isinstance(expected, Each):
        same = agreed([found, expected]) is not None
    else:
        same = isinstance(found, Free | Total) and type(found) is type(expected)
    if same and close(found.growth, expected.growth):  # type: ignore[union-attr]
        return None
    return "its examples see one another, or it is not linear"


def _trusted(operation: Operation) -> bool:
    """Whether it is our own loss, which keeps rows apart, in blocks that no walk sees through."""
    called = _jax.custom_function(operation.steps[0].equation)
    return called.startswith("_statistics at ") and "jaxmem/ops/cross_entropy.py:" in called


def _by_rows(operation: Operation) -> list[Kind]:
    rows, labels = operation.kinds[0], operation.kinds[-1]
    others = operation.kinds[1:-1]
    for kind in operation.kinds:
        if isinstance(kind, Unproved):
            return [kind] * len(operation.results)
    own = [kind for kind in (rows, labels) if isinstance(kind, Each) and kind.axis == 0]
    common = agreed(own) if len(own) == 2 else None
    if common is None or not all(isinstance(kind, Free) for kind in others):
        return [operation.mixes] * len(operation.results)
    if not all(close(kind.growth, 1) for kind in operation.kinds):
        return [operation.sized] * len(operation.results)
    return [common] * len(operation.results)


def _call(operation: Operation, which: int, values, at: list[int]) -> tuple[Callable, list[Any]]:
    """The call as a function of its real operands, and these."""
    step = operation.steps[which]

    def call(*chosen):
        filled = list(values[: len(operation.kinds)])
        for index, value in zip(at, chosen, strict=True):
            filled[index] = value
        return _jax.evaluate(step, filled)

    return call, [values[index] for index in at]


def _real(operation: Operation) -> tuple[list[int], list[int]]:
    """Which operands and which results of a call have derivatives."""
    equation = operation.steps[0].equation
    operands, results = (
        [at for at, atom in enumerate(atoms) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
        for atoms in (equation.invars, equation.outvars)
    )
    return operands, results


def _avals(operation: Operation, which: int) -> list[Any]:
    return [_abstract(atom.aval) for atom in operation.steps[which].equation.invars]


def _abstract(aval) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _pairs(steps, which: str):
    return zip(*(getattr(step, which) for step in steps), strict=True)


_ANOTHER = Unproved("its program is another for a slice")


# Which for one example may be missing, or be there besides.
_SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


def _keeps_order(step: _jax.Step) -> bool:
    """Whether a change of shape leaves the elements in row-major order."""
    params = step.equation.params
    axes = list(params.get("broadcast_dimensions", ()))
    return axes == sorted(axes) and params.get("dimensions") in (None, *_squeezed(step))


def _squeezed(step: _jax.Step) -> list[Any]:
    return [step.equation.params["dimensions"]] if step.primitive == "squeeze" else []


def _same_form(one: _jax.Step, two: _jax.Step) -> bool:
    sizes = (len(one.inputs), len(one.outputs)), (len(two.inputs), len(two.outputs))
    return one.primitive == two.primitive and sizes[0] == sizes[1]


def _is_known(found: dict, one: _jax.Step, two: _jax.Step) -> bool:
    """Whether the operands of two steps are the same values in both programs."""
    return all(
        pair in found if isinstance(pair[0], int) else not isinstance(pair[1], int)
        for pair in zip(one.inputs, two.inputs, strict=True)
    )


def _read(found: dict[tuple[int, int], Kind], one: Any, two: Any) -> Kind:
    """The kind of an operand, which is the same value in both programs."""
    if isinstance(one, int) and isinstance(two, int):
        return found.get((one, two), _ANOTHER)
    if isinstance(one, int) or isinstance(two, int):
        return _ANOTHER
    return constant(one.val, two.val)


def _needed(flat: _jax.FlatJaxpr) -> list[_jax.Step]:
    """The steps that the results are made of: metrics beside a loss may be anything."""
    wanted = {value for value in flat.outputs if isinstance(value, int)}
    found = []
    for step in reversed(flat.steps):
        if not wanted.isdisjoint(step.outputs):
            wanted.update(step.uses)
            found.append(step)
    return found[::-1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
