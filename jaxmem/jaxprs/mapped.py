"""A program inside of `jax.shard_map`, as it runs on each device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxmem.jaxprs.equations import operation_of
from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.flattening import flatten_jaxpr

if TYPE_CHECKING:
    from jax.extend.core import Literal


def is_local(equation: Any) -> bool:
    """Whether it is a `jax.shard_map` over all axes of its mesh that cut anything: what is inside
    has the pieces of one device."""
    return operation_of(equation) == "shard_map" and not automatic_axes(equation)


def automatic_axes(equation: Any) -> dict[str, int]:
    """The axes of a mesh that a `jax.shard_map` leaves to the compiler, which cuts what is inside
    along them."""
    manual, shape = _manual_axes(equation), equation.params["mesh"].shape
    return {name: size for name, size in shape.items() if size > 1 and name not in manual}


def _manual_axes(equation: Any) -> frozenset[str]:
    given = equation.params
    return frozenset(given.get("manual_axes", given.get("newly_manual_axes")))  # jax 0.12; before


def mapped_like(step: FlatStep, fun: Callable, results: Sequence[int]) -> Callable:
    """Another function of one device's pieces, mapped as a `jax.shard_map` maps its own, of which
    it returns the ``results`` at some places."""
    given = step.equation.params
    out = tuple(given["out_specs"][at] for at in results)
    return _mapped(
        step.equation, lambda *pieces: tuple(fun(*pieces)), tuple(given["in_specs"]), out
    )


def _mapped(equation: Any, fun: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
    given = equation.params
    return jax.shard_map(
        fun,
        mesh=given["mesh"],
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=given["check_vma"],
        axis_names=_manual_axes(equation),
    )


def inside_of(equation: Any, fun: Callable[[], Any]) -> Any:
    """What a function returns that traces where a `jax.shard_map` traces what it maps: the axes of
    the mesh have names there."""
    found: list[Any] = []

    def run():
        found.append(fun())
        return ()

    jax.eval_shape(_mapped(equation, run, (), ()))
    return found[0]


def localized(flat: FlatJaxpr) -> FlatJaxpr:
    """A program of which each `jax.shard_map` is written in place, as XLA has it; values that it
    takes and makes are the pieces inside. (So is what waits for one in a barrier.)"""
    avals, steps = list(flat.avals), []
    renamed: dict[int, int | Literal] = {}
    pieces: dict[int, Any] = {}

    def now(operand: int | Literal) -> int | Literal:
        return renamed.get(operand, operand) if isinstance(operand, int) else operand

    for step in flat.steps:
        inputs = tuple(map(now, step.inputs))
        if step.primitive != "shard_map":
            steps.append(dataclasses.replace(step, inputs=inputs))
            continue
        body = flatten_jaxpr(step.equation.params["jaxpr"])
        number: dict[int, Any] = dict(zip(range(body.input_count), inputs, strict=True))
        for one, outer in number.items():
            if isinstance(outer, int):
                pieces[outer] = body.avals[one]
        for outer, result in zip(step.outputs, body.outputs, strict=True):
            if isinstance(result, int):
                pieces[outer] = body.avals[result]
                if number.setdefault(result, outer) == outer:
                    continue
                renamed[outer] = number[result]
            else:
                renamed[outer] = result
        for inner in body.steps:
            for value in inner.outputs:
                if value not in number:
                    number[value] = len(avals)
                    avals.append(body.avals[value])
            steps.append(_renumbered(inner, number))
    for step in reversed(steps):
        if step.primitive == "optimization_barrier":
            for value, passed in zip(step.inputs, step.outputs, strict=True):
                if isinstance(value, int) and passed in pieces:
                    pieces.setdefault(value, pieces[passed])
    for value, aval in pieces.items():
        avals[value] = aval
    outputs = tuple(map(now, flat.outputs))
    return dataclasses.replace(flat, steps=tuple(steps), avals=tuple(avals), outputs=outputs)


def _renumbered(step: FlatStep, number: Mapping[int, Any]) -> FlatStep:
    inputs = tuple(number[x] if isinstance(x, int) else x for x in step.inputs)
    outputs = tuple(number[x] for x in step.outputs)
    return dataclasses.replace(step, inputs=inputs, outputs=outputs)
