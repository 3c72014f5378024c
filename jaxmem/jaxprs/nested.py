"""Equations that hold programs of their own: scans, conditionals, calls, scatters."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import (
    called_by_rule,
    inner_jaxprs,
    parameters_of,
    scan_parts,
)
from jaxmem.jaxprs.flat import FlatJaxpr, evaluate, read
from jaxmem.jaxprs.flattening import flatten_jaxpr

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


def inner_in(equation: JaxprEqn, dtype: Any) -> dict[str, Any]:
    """The jaxprs of an equation that combine two numbers (of a scatter, a reduction or a window),
    traced anew for numbers of another dtype."""

    def cast(value):
        return jnp.asarray(
            value, dtype if jnp.issubdtype(jnp.result_type(value), jnp.floating) else None
        )

    def again(jaxpr):
        flat = flatten_jaxpr(jaxpr)

        def combine(*numbers):
            values = dict(enumerate([*flat.consts, *numbers]))
            for step in flat.steps:
                operands = [cast(read(values, operand)) for operand in step.inputs]
                values.update(zip(step.outputs, evaluate(step, operands), strict=True))
            return [cast(read(values, output)) for output in flat.outputs]

        count = flat.input_count - len(flat.consts)
        new = jax.make_jaxpr(combine)(*[jax.ShapeDtypeStruct((), dtype)] * count)
        return new if hasattr(jaxpr, "consts") else new.jaxpr

    given = equation.params.items()
    return {name: again(value) for name, value in given if hasattr(value, "eqns")}


@dataclasses.dataclass(frozen=True)
class NestedLoop:
    """A scan (``condition`` is None) or a while loop, in the terms of `jax.lax`."""

    body: FlatJaxpr
    condition: FlatJaxpr | None
    body_consts: slice
    condition_consts: slice
    carry: slice
    options: dict[str, Any]
    operands: int  # of the body


def loop_of(equation: JaxprEqn, differentiated: bool = True) -> NestedLoop:
    """What a scan or while equation is made of, with nothing twice in its body; slices are of its
    operands. ``differentiated``: as `flatten_jaxpr` takes it."""
    given = equation.params
    if equation.primitive.name == "scan":
        consts, carry = scan_parts(equation)
        options = {name: given[name] for name in ("length", "reverse", "unroll")}
        parts = slice(0, consts), slice(0, 0), slice(consts, consts + carry)
        count = len(equation.invars)
        body = flatten_jaxpr(given["jaxpr"], merge=True, differentiated=differentiated)
        return NestedLoop(body, None, *parts, options, count)
    first, consts = given["cond_nconsts"], given["body_nconsts"]
    count = len(equation.invars)
    parts = slice(first, first + consts), slice(0, first), slice(first + consts, count)
    condition = flatten_jaxpr(given["cond_jaxpr"])
    body = flatten_jaxpr(given["body_jaxpr"], merge=True, differentiated=differentiated)
    return NestedLoop(body, condition, *parts, {}, count - first)


def branches_of(equation: JaxprEqn) -> list[FlatJaxpr] | None:
    """The branches of a cond; None where the platform chooses among them."""
    if equation.params.get("branches_platforms") is not None:
        return None
    return [flatten_jaxpr(branch) for branch in equation.params["branches"]]


def without_results(equation: JaxprEqn, at: Collection[int]) -> JaxprEqn:
    """A cond without those of its results that stand at some places."""

    def fewer(branch: ClosedJaxpr) -> ClosedJaxpr:
        def run(*operands):
            return _others(internals.jaxpr_as_fun(branch)(*operands), at)

        return jax.make_jaxpr(run)(*branch.in_avals)

    branches = tuple(map(fewer, equation.params["branches"]))
    outvars = _others(equation.outvars, at)
    return equation.replace(outvars=outvars, params={**equation.params, "branches": branches})


def _others(values: Sequence[Any], at: Collection[int]) -> list[Any]:
    return [value for place, value in enumerate(values) if place not in at]


def mapped_body(equation: JaxprEqn) -> FlatJaxpr:
    """What each device runs of a `jax.shard_map`, with nothing twice in it."""
    (body,) = inner_jaxprs(equation)
    return flatten_jaxpr(body, merge=True)


def called_jaxpr(equation: JaxprEqn, differentiated: bool = True) -> FlatJaxpr:
    """What a checkpoint, custom_jvp or custom_vjp equation computes. ``differentiated``: as
    `flatten_jaxpr` takes it."""
    called = called_by_rule(equation) or parameters_of(equation)["jaxpr"]
    return flatten_jaxpr(called, merge=not differentiated, differentiated=differentiated)


def picked_axis(equation: JaxprEqn) -> int | None:
    """The axis along which a gather takes one element of every row, as `jnp.take_along_axis` does;
    None: it takes something else."""
    operand, indices = (variable.aval for variable in equation.invars)
    numbers, shape = equation.params["dimension_numbers"], operand.shape
    if len(numbers.start_index_map) != 1 or set(equation.params["slice_sizes"]) != {1}:
        return None
    axis = int(numbers.start_index_map[0])
    rows, of_rows = map(list, (numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    in_order = rows == sorted(rows) and of_rows == sorted(of_rows)
    others = {at for at, size in enumerate(shape) if size > 1} - {axis}
    one_each = others <= set(rows) and indices.size * shape[axis] == operand.size
    return axis if in_order and one_each else None
