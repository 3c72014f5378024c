"""A flat jaxpr read as a program."""

import dataclasses
import functools
import math
from collections.abc import Set

import jax.numpy as jnp

from jaxmem.jaxprs.equations import inner_jaxprs, is_region
from jaxmem.jaxprs.flat import FlatJaxpr, Step, flatten_jaxpr
from jaxmem.jaxprs.joint import joint as joint_of
from jaxmem.jaxprs.nested import Loop, called_jaxpr, loop_of
from jaxmem.jaxprs.residuals import scan_residuals
from jaxmem.program.costs import (
    derivative_reads,
    flops,
    is_batched,
    is_fused,
    precision_of,
    slides,
)
from jaxmem.program.opaque import halves, peak
from jaxmem.program.operations import Operation, Program

# What has a program inside that nothing is planned in.
_OPAQUE = frozenset(
    """
    cond custom_jvp_call custom_linear_solve custom_vjp_call custom_vjp_call_jaxpr
    ragged_dot_general shard_map while
    """.split()
)


def read_program(
    flat: FlatJaxpr, differentiated: Set[int] | None = None, fixed: Set[int] = frozenset()
) -> Program:
    """The operations of a flat jaxpr as plain data.

    ``differentiated`` are the inputs that gradients are taken of; None: all. Of ``fixed`` inputs
    and of arrays closed over none ever are.
    """
    fixed = {*fixed, *flat.arrays_closed_over}
    sizes = [size_of(aval) for aval in flat.avals]
    types = [type_of(aval) for aval in flat.avals]
    operations = []
    read = {value for step in flat.steps for value in step.uses}
    read |= {value for value in flat.outputs if isinstance(value, int)}
    for step in flat.steps:
        constant = [not isinstance(one, int) or one in fixed for one in step.inputs]
        if all(constant):
            fixed.update(step.outputs)
        held = _held(step, constant, read)
        outputs = step.outputs
        if held.residuals is not None:
            outputs = (*outputs, len(sizes))
            sizes.append(held.residuals)
            types.append("residuals[]")
        operations.append(
            Operation(
                step.primitive,
                tuple(step.uses),
                outputs,
                flops(step.equation),
                is_fused(step.equation),
                derivative_reads(step),
                str(step.name_stack),
                step.line,
                held.body,
                step.equation.params["length"] if step.primitive == "scan" else 1,
                _carry(step, held.body),
                None if held.residuals is None else outputs[-1],
                held.inside,
                held.workspace,
                held.reads,
                results=held.results,
                batched=is_batched(step.equation),
                precision=precision_of(step.equation.params),
                slides=slides(step.equation),
            )
        )
    outputs = tuple(value for value in flat.outputs if isinstance(value, int))
    return Program(
        tuple(operations),
        tuple(sizes),
        flat.input_count,
        outputs,
        tuple(types),
        None if differentiated is None else frozenset(differentiated),
        flat.opened,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """What an operation holds, as in `Operation`."""

    body: Program | None = None
    residuals: int | None = None
    inside: int = 0
    workspace: int = 0
    reads: frozenset[int] | None = None
    results: int = 0


def _held(step: Step, constant: list[bool], read: Set[int]) -> _Held:
    """What a step holds whose operands are ``constant`` or not, and whose results are ``read`` or
    not."""
    if step.primitive == "scan":
        if not step.equation.params["length"]:
            return _Held()
        return _of_scan(step, constant, [value in read for value in step.outputs])
    if is_region(step.equation):
        called = called_jaxpr(step.equation)
        body = read_program(called, fixed=_inputs(called, constant))
        return _Held(body, inside=_made(body))
    if step.primitive in _OPAQUE and not is_fused(step.equation):
        real = [
            at
            for at, variable in enumerate(step.equation.invars)
            if not constant[at] and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
        ]
        return (_of_opaque(step, real) if real else None) or _Held(workspace=_workspace(step))
    return _Held()


def _of_scan(step: Step, constant: list[bool], wanted: list[bool]) -> _Held:
    loop = loop_of(step.equation)
    if all(constant):
        body = read_program(loop.body, fixed=set(range(loop.body.input_count)))
        return _Held(body, 0, 0, _turn(loop))
    constant = list(constant)
    constant[loop.carry] = [False] * len(constant[loop.carry])  # the next ones may not be
    body = read_program(loop.body, fixed=_inputs(loop.body, constant))
    kept, results = scan_residuals(step.equation, constant, wanted)
    each = sum(map(size_of, kept))
    length = step.equation.params["length"]
    return _Held(body, each * length, _made(body), results=sum(map(size_of, results)))


def _of_opaque(step: Step, real: list[int]) -> _Held | None:
    """By the operation and its derivative by some operands, as JAX has them; None: the derivative
    refuses, in words of its own, which who differentiates the function is told."""
    try:
        joint = joint_of(step, real)
    except Exception:
        return None
    results = {value for value in joint.results if isinstance(value, int)}
    gradients = {  # one of a value, however often it is an operand
        step.inputs[at]: value
        for at, value in zip(real, joint.flat.outputs[len(joint.results) :], strict=True)
        if isinstance(value, int)
    }
    found = halves(
        _forward(joint.flat),
        joint.boundary,
        set(joint.cotangents),
        results,
        set(gradients.values()),
    )
    values = zip((*joint.operands, *joint.results), (*step.inputs, *step.outputs), strict=True)
    reads = {one for inner, one in values if inner in found.reads and isinstance(one, int)}
    kept = found.kept or None  # a value of no bytes would have to be made again too
    return _Held(None, kept, found.backward, found.forward, frozenset(reads))


def _workspace(step: Step) -> int:
    """The most bytes that an operation takes inside, beside operands and results."""
    if step.primitive == "shard_map":  # what is inside has a part of each value
        return 0
    if step.primitive == "while":
        return _turn(loop_of(step.equation))
    most = 0
    for jaxpr in inner_jaxprs(step.equation):
        program = _forward(flatten_jaxpr(jaxpr))
        inputs = set(range(program.input_count))
        results = set(program.outputs) - inputs
        taken = peak(program, program.kernels, inputs, last=results)
        most = max(most, taken - sum(program.sizes[value] for value in results))
    return most


def _turn(loop: Loop) -> int:
    """The most bytes that a turn of a loop takes beside what it is handed, which it may write over:
    what it hands on has the same memory in the end."""
    program = _forward(loop.body)
    count = loop.carry.stop - loop.carry.start
    first = program.input_count - loop.operands + loop.body_consts.stop - loop.body_consts.start
    handed = set(range(first, first + count))
    handed_on = {value for value in loop.body.outputs[:count] if isinstance(value, int)}
    outside = {*range(program.input_count), *program.outputs} - handed - handed_on
    most = peak(program, program.kernels, outside, handed, handed_on)
    return max(most - sum(program.sizes[value] for value in handed), 0)


def _forward(flat: FlatJaxpr) -> Program:
    """A program that nothing is differentiated in."""
    return read_program(flat, frozenset(), set(range(flat.input_count)))


def _made(body: Program) -> int:
    return sum(body.sizes[value] for kernel in body.kernels for value in kernel.results)


def _inputs(body: FlatJaxpr, chosen: list[bool]) -> set[int]:
    """The inputs of a body that some operands of its equation become."""
    first = body.input_count - len(chosen)  # the body's own constants come first
    return {first + at for at, one in enumerate(chosen) if one}


def _carry(step: Step, body: Program | None) -> tuple[int, ...]:
    if body is None or step.primitive != "scan":
        return ()
    first = body.input_count - len(step.equation.invars)  # the body's own constants come first
    carry = loop_of(step.equation).carry
    return tuple(range(first + carry.start, first + carry.stop))


def type_of(aval) -> str:
    """Dtype and shape of an abstract value as text."""
    return _type(getattr(aval, "dtype", ""), tuple(getattr(aval, "shape", ())))


@functools.cache
def _type(dtype, shape: tuple) -> str:
    return f"{dtype}{list(shape)}"


def size_of(aval) -> int:
    """Bytes of an abstract value."""
    if not hasattr(aval, "shape"):
        return 0  # a token
    return math.prod(aval.shape) * aval.dtype.itemsize
