"""A flat jaxpr read as a program."""

import dataclasses
from collections.abc import Iterator, Set
from typing import Any

from jaxmem.jaxprs.equations import CUSTOM_RULES, closed_inner_jaxprs, is_region
from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.flattening import flatten_jaxpr
from jaxmem.jaxprs.mapped import inside_of, is_local
from jaxmem.jaxprs.nested import NestedLoop, called_jaxpr, loop_of, mapped_body
from jaxmem.jaxprs.operands import differentiable
from jaxmem.jaxprs.regions import policy_saves
from jaxmem.jaxprs.residuals import SavedResidual, region_residuals, scan_residuals
from jaxmem.jaxprs.shardings import Shardings
from jaxmem.program.abstract_values import size_of, type_of
from jaxmem.program.constants import constant_operands, constant_values
from jaxmem.program.convolutions import NO_COPIES, ConvolutionCopies, convolved_axes, copies_of
from jaxmem.program.costs import (
    calls,
    derivative_reads,
    flops,
    is_batched,
    is_fused,
    is_known,
    is_of_vectors,
    name_of,
    operand_axes,
    overlaps,
    precision_of,
    slides,
)
from jaxmem.program.custom_rules import by_rule, read_by_rule
from jaxmem.program.expansions import operand_reads
from jaxmem.program.kept_bytes import bytes_alike
from jaxmem.program.opaque import JointProgram
from jaxmem.program.opaque_operations import OpaqueOperations
from jaxmem.program.operations import Communication, Contraction, Operation, Program, Source
from jaxmem.program.ragged import shared_copies
from jaxmem.program.stacks import NO_STACKS, LoopStacks, relaid_bytes
from jaxmem.program.transposes import folded_transposes
from jaxmem.program.undifferentiated import bytes_taken, fused_further, turn_bytes

# What has a program inside that nothing is planned in.
_OPAQUE = CUSTOM_RULES | set("cond custom_linear_solve ragged_dot_general shard_map while".split())


def read_program(
    flat: FlatJaxpr,
    differentiated: Set[int] | None = None,
    shards: Shardings | None = None,
    separate: bool = False,
) -> Program:
    """The operations of a flat jaxpr as plain data.

    ``differentiated`` are the inputs that gradients are taken of; None: all. ``shards`` says what
    one device has of each value; None: there is one. ``separate``: its derivative is compiled
    apart from it, as that of a loop's body is.
    """
    shards = shards or Shardings(flat)
    constants = constant_values(flat, differentiated)
    pieces = [shards.aval(value) for value in range(len(flat.avals))]
    sizes, types = list(map(size_of, pieces)), list(map(type_of, pieces))
    whole_sizes, whole_types = list(map(size_of, flat.avals)), list(map(type_of, flat.avals))
    operations = []
    turned = {value for step in flat.steps if step.primitive == "rev" for value in step.outputs}
    folded = folded_transposes(flat)
    read = {value for step in flat.steps for value in step.uses}
    read.update(flat.observed)
    opaque = OpaqueOperations(shards, separate, _forward)
    for step in flat.steps:
        constant = [not isinstance(one, int) or one in constants for one in step.inputs]
        interior = _interior_of(step, constant, read, opaque)
        outputs = step.outputs
        if interior.residuals is not None:
            outputs = (*outputs, len(sizes))
            sizes.append(interior.residuals)
            whole_sizes.append(interior.whole)
            types.append("residuals[]")
            whole_types.append("residuals[]")
        operations.append(
            Operation(
                name_of(step.equation) if folded.isdisjoint(step.outputs) else "reshape",
                tuple(step.uses),
                outputs,
                _flops(step, interior.body, shards),
                is_fused(step.equation),
                derivative_reads(step),
                Source(
                    str(step.name_stack),
                    step.line,
                    calls(step.equation),
                    not flat.merged.isdisjoint(step.outputs),
                    by_rule(step).computed,
                    operand_reads(step.equation),
                ),
                interior.body,
                step.equation.params["length"] if step.primitive == "scan" else 1,
                _carry(step, interior.body),
                None if interior.residuals is None else outputs[-1],
                interior.inside,
                interior.workspace,
                interior.reads,
                stacks=interior.stacks,
                joint=interior.joint,
                contraction=Contraction(
                    is_batched(step.equation),
                    is_of_vectors(step.equation),
                    slides(step.equation),
                    _copies(step, turned),
                    convolved_axes(step.equation),
                    precision_of(step.equation.params),
                    operand_axes(step.equation),
                    _batch_axes(step),
                    overlaps(step.equation),
                ),
                communication=Communication((), shards.summed(step), shards.aligned(step)),
            )
        )
    for value in shared_copies(operations):
        sizes[value] = whole_sizes[value] = 0
    gathered: dict[Any, int] = {}
    for reshard in shards.reshards:
        piece = shards.aval(reshard.value, reshard.parts)
        value = gathered.setdefault((reshard.value, reshard.parts), len(sizes))
        if value == len(sizes):
            sizes.append(size_of(piece))
            types.append(type_of(piece))
        operation = operations[reshard.step]
        gathers = (*operation.communication.gathers, (reshard.value, value, reshard.ring))
        communication = dataclasses.replace(operation.communication, gathers=gathers)
        operations[reshard.step] = dataclasses.replace(operation, communication=communication)
    several = shards.mesh is not None
    return Program(
        tuple(operations),
        tuple(sizes),
        flat.input_count,
        flat.observed,
        tuple(types),
        None if differentiated is None else frozenset(differentiated),
        flat.inlined_checkpoints,
        whole_sizes=tuple(whole_sizes) if several else (),
        whole_types=tuple(whole_types) if several else (),
        in_loop=separate,
        has_plainer_gathers=flat.has_plainer_gathers,
    )


def _copies(step: FlatStep, turned: Set[int]) -> ConvolutionCopies:
    if step.primitive != "conv_general_dilated":
        return NO_COPIES
    return copies_of(step.equation, step.inputs[1] in turned)


def _batch_axes(step: FlatStep) -> int:
    if step.primitive != "gather":
        return 0
    return len(step.equation.params["dimension_numbers"].operand_batching_dims)


@dataclasses.dataclass(frozen=True, slots=True)
class _Interior:
    """What an operation holds, as in `Operation`; ``whole`` are the residuals of all devices."""

    body: Program | None = None
    residuals: int | None = None
    whole: int = 0
    inside: int = 0
    workspace: int = 0
    reads: frozenset[int] | None = None
    stacks: LoopStacks = NO_STACKS
    joint: JointProgram | None = None


def _interior_of(
    step: FlatStep, constant: list[bool], read: Set[int], opaque: OpaqueOperations
) -> _Interior:
    """What a step holds whose operands are ``constant`` or not, and whose results are ``read`` or
    not."""
    shards = opaque.shards
    if step.primitive == "scan":
        if not step.equation.params["length"]:
            return _Interior()
        return _of_scan(step, constant, [value in read for value in step.outputs], shards)
    if is_region(step.equation):
        called = called_jaxpr(step.equation, differentiated=not all(constant))
        wanted = frozenset() if all(constant) else _differentiated(called, constant)
        body = read_program(called, wanted, shards.inside(called, step.inputs))
        # Where nothing is differentiated any more it runs here, forward and backward pass.
        workspace = bytes_taken(fused_further(body)) if all(constant) else 0
        body = dataclasses.replace(body, policy_saves=frozenset(_saved(step, called)))
        kept = _kept_of_region(step, constant)
        saved = bytes_alike(kept, body)
        whole = sum(size_of(one.aval) for one in kept)
        return _Interior(body, saved or None, whole, workspace=workspace)
    is_opaque = step.primitive in _OPAQUE and not is_fused(step.equation)
    if not is_opaque and is_known(step):
        return _Interior(reads=read_by_rule(step))
    real = differentiable([variable.aval for variable in step.equation.invars], constant)
    both = opaque.with_derivative(step, real) if real else None
    if both is None:
        found = _Interior(workspace=_workspace(step, shards) if is_opaque else 0)
    else:
        taken = both.bytes
        bare = taken.kept_of_all, taken.backward, taken.forward, taken.reads
        # A value of no bytes would have to be made again too.
        found = _Interior(None, taken.kept or None, *bare, joint=both)
    if is_local(step.equation) and step.equation.params["mesh"].size > 1:
        # As it may be recomputed: from all that it reads.
        program = _of_mapped(step, constant)
        found = dataclasses.replace(found, body=program, residuals=found.residuals or 0, reads=None)
    return found


def _of_mapped(step: FlatStep, constant: list[bool]) -> Program:
    """What a `jax.shard_map` has for each device."""
    body = mapped_body(step.equation)
    wanted = _differentiated(body, constant)
    return inside_of(step.equation, lambda: read_program(body, wanted))


def _kept_of_region(step: FlatStep, constant: list[bool]) -> list[SavedResidual]:
    """What a user's own region saves by its policy; nothing, where its derivative refuses."""
    if all(constant):
        return []
    try:
        return region_residuals(step, constant)
    except Exception:
        return []


def _saved(step: FlatStep, called: FlatJaxpr) -> Iterator[int]:
    """The values of a region that its policy saves, or sends to host memory."""
    for inner in called.steps:
        if policy_saves(step.equation, inner.equation):
            yield from inner.outputs
            if inner.primitive == "name":  # what is named is as good as saved
                yield from inner.uses


def _of_scan(
    step: FlatStep, constant: list[bool], wanted: list[bool], shards: Shardings
) -> _Interior:
    loop = loop_of(step.equation, differentiated=not all(constant))
    inside = shards.for_iteration(step, loop.body)
    if all(constant):
        body, carried = _turn(loop, read_program(loop.body, frozenset(), inside))
        return _Interior(body, 0, 0, 0, turn_bytes(body, carried))
    constant = constant_operands(loop, constant)
    body = read_program(loop.body, _differentiated(loop.body, constant), inside, separate=True)
    found = scan_residuals(step.equation, constant, wanted)
    kept, length = found.kept, step.equation.params["length"]
    operands = (*step.inputs[loop.body_consts], *step.inputs[loop.carry.stop :])
    varying = (*constant[loop.body_consts], *constant[loop.carry.stop :])
    stacks = LoopStacks(
        bytes_alike(found.results, body),
        length * relaid_bytes(loop.body, kept, body.sizes),
        tuple((type_of(one.aval, length), length * bytes_alike([one], body)) for one in kept),
        tuple(one for one, fixed in zip(operands, varying, strict=True) if not fixed),
        frozenset(step.uses).difference(_numbers(step, found.read_again)),
    )
    return _Interior(
        body,
        length * bytes_alike(kept, body),
        length * sum(size_of(one.aval) for one in kept),
        _inside(body),
        reads=_numbers(step, found.operands_read) | {step.outputs[at] for at in found.results_read},
        stacks=stacks,
    )


def _numbers(step: FlatStep, operands: Set[int]) -> frozenset[int]:
    """The values that some operands are, but for literals."""
    values = (step.inputs[at] for at in operands)
    return frozenset(value for value in values if isinstance(value, int))


def _workspace(step: FlatStep, shards: Shardings) -> int:
    """The most bytes that an operation takes inside, beside operands and results."""
    if step.primitive == "while":
        loop = loop_of(step.equation, differentiated=False)
        handed = step.inputs[loop.body_consts], step.inputs[loop.carry]
        inside = shards.inside(loop.body, [*handed[0], *handed[1]])
        return turn_bytes(*_turn(loop, read_program(loop.body, frozenset(), inside)))
    most = 0
    for jaxpr in closed_inner_jaxprs(step.equation):
        flat = flatten_jaxpr(jaxpr, merge=True, differentiated=False)
        count = flat.input_count - len(flat.consts)
        if step.primitive == "shard_map":
            program = _forward(flat, shards.mapped(step, flat))
        else:
            operands = step.inputs[len(step.inputs) - count :]
            program = _forward(flat, shards.inside(flat, operands))
        most = max(most, bytes_taken(program))
    return most


def _turn(loop: NestedLoop, body: Program) -> tuple[Program, tuple[int, ...]]:
    """What a loop repeats that nothing is differentiated in, and what is carried of its inputs."""
    count = loop.carry.stop - loop.carry.start
    first = body.input_count - loop.operands + loop.body_consts.stop - loop.body_consts.start
    handed_on = frozenset(value for value in loop.body.outputs[:count] if isinstance(value, int))
    body = dataclasses.replace(fused_further(body), handed_on=handed_on)
    return body, tuple(range(first, first + count))


def _forward(flat: FlatJaxpr, shards: Shardings) -> Program:
    """A program that nothing is differentiated in."""
    return fused_further(read_program(flat, frozenset(), shards))


def _inside(body: Program) -> int:
    """The most bytes that a body holds while its derivative is taken: all that it makes, and what
    one of its operations holds inside."""
    made = sum(body.sizes[value] for kernel in body.kernels for value in kernel.results)
    return made + max((operation.derivative_workspace for operation in body.operations), default=0)


def _differentiated(body: FlatJaxpr, constant: list[bool]) -> set[int]:
    """The inputs of a body whose derivative may be asked for, given which operands of its equation
    are constant."""
    first = body.input_count - len(constant)  # the body's own constants come first
    return {*range(first), *(first + at for at, one in enumerate(constant) if not one)}


def _flops(step: FlatStep, body: Program | None, shards: Shardings) -> int:
    """FLOPs of a step on one device."""
    if body is None or shards.mesh is None:
        return flops(step.equation) // shards.devices(step)
    return body.flops * step.equation.params.get("length", 1)


def _carry(step: FlatStep, body: Program | None) -> tuple[int, ...]:
    if body is None or step.primitive != "scan":
        return ()
    first = body.input_count - len(step.equation.invars)  # the body's own constants come first
    carry = loop_of(step.equation).carry
    return tuple(range(first + carry.start, first + carry.stop))
