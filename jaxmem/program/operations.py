"""The plain data that planners work on."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Set

from jaxmem.jaxprs.equations import is_region
from jaxmem.jaxprs.flat import FlatJaxpr, Step
from jaxmem.jaxprs.nested import called_jaxpr, loop_of
from jaxmem.jaxprs.residuals import scan_residuals
from jaxmem.program.costs import CONTRACTIONS, derivative_reads, flops, is_batched, is_fused
from jaxmem.program.kernels import Kernel, read_kernels


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation: the values it reads and makes (by number), its FLOPs, whether XLA fuses it
    with its neighbours, what its derivative reads (``"nothing"``, its ``"result"``, its
    ``"operands"``, or some of those: see `derivative_reads`), and where it came from: the module
    path (``ResNet/Block_3/Conv_1``) and the user's source line. A matmul is ``batched`` if it has
    batch dimensions, as attention's scores have.

    A `scan` also has ``body``, what it repeats ``length`` times, and makes one value more than it
    returns: its ``residuals``, what every iteration keeps for the backward pass; ``carry`` are
    the inputs of the body that one iteration hands to the next. A user's own
    `jax.checkpoint` has the ``body`` that its derivative runs again. ``inside`` are bytes that the
    derivative takes beside its operands and results. A ``widened`` one is computed in float32, from
    copies of what it reads.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    fused: bool
    derivative_reads: str
    path: str = ""
    line: str = ""
    body: "Program | None" = None
    length: int = 1
    carry: tuple[int, ...] = ()
    residuals: int | None = None
    inside: int = 0
    widened: bool = False
    batched: bool = False

    @property
    def is_region(self) -> bool:
        """Whether it is a user's own `jax.checkpoint`."""
        return self.body is not None and self.residuals is None


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in order, and the bytes and types of every value. Values below ``input_count``
    are the function's inputs, which live in any case; ``differentiated`` are those of them that
    gradients are taken of (None: all), ``opened`` is how many regions of the user's own were
    written in place."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    input_count: int
    outputs: tuple[int, ...]
    types: tuple[str, ...] = ()
    differentiated: frozenset[int] | None = None
    opened: int = 0

    @functools.cached_property
    def input_bytes(self) -> int:
        """Bytes of all inputs."""
        return sum(self.sizes[: self.input_count])

    @functools.cached_property
    def boundary_bytes(self) -> int:
        """Bytes of inputs, outputs and gradients: XLA holds them from the first kernel of
        ``value_and_grad`` to the last."""
        gradients = (value for value in range(self.input_count) if self.active[value])
        return self.input_bytes + sum(self.sizes[v] for v in (*set(self.outputs), *gradients))

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of all matmuls and convolutions."""
        return sum(operation.flops for operation in self.operations)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of operations, connections and sizes: a plan belongs to one of them."""
        whole = (self.sizes, self.types, self.input_count, self.outputs)
        digest = hashlib.sha256(repr(whole).encode())
        for operation in self.operations:
            digest.update(repr((operation.name, operation.inputs, operation.outputs)).encode())
            if operation.body:
                digest.update(operation.body.fingerprint.encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that XLA is expected to make of it."""
        return read_kernels(self)

    @functools.cached_property
    def made(self) -> list[int]:
        """For each value in memory the number of kernels that have run once it exists (0: an
        input)."""
        position = [0] * len(self.sizes)
        for index, kernel in enumerate(self.kernels):
            for value in kernel.results:
                position[value] = index + 1
        return position

    @functools.cached_property
    def last_used(self) -> list[int]:
        """For each value in memory the number of kernels that have run after its last use; a value
        never read dies where it is made, an output of the program outlives every kernel."""
        position = list(self.made)
        for index, kernel in enumerate(self.kernels):
            for value in kernel.sources:
                position[value] = index + 1
        for value in self.outputs:
            position[value] = len(self.kernels) + 1
        return position

    @functools.cached_property
    def active(self) -> list[bool]:
        """For each value whether it has a cotangent: it is of a floating type and depends on a
        differentiated input."""
        count = len(self.sizes)
        if self.types:
            real = [kind.startswith(("float", "bfloat", "complex")) for kind in self.types]
        else:
            real = [True] * count
        wanted = self.differentiated
        active = [
            real[value] and value < self.input_count and (wanted is None or value in wanted)
            for value in range(count)
        ]
        for operation in self.operations:
            if operation.name != "stop_gradient" and any(active[v] for v in operation.inputs):
                for value in operation.outputs:
                    active[value] = real[value] and value != operation.residuals
        return active

    def operation_of(self, kernel: int) -> Operation:
        """The operation that completes a kernel."""
        return self.operations[self.kernels[kernel].operations[-1]]

    def residual_bytes(self, kernel: int) -> int:
        """Bytes of the residuals of a scan."""
        value = self.kernels[kernel].residuals
        return 0 if value is None else self.sizes[value]

    @functools.cached_property
    def scans(self) -> list[int]:
        """Numbers of the kernels that are a `scan`."""
        return [
            index
            for index, kernel in enumerate(self.kernels)
            if self.operations[kernel.operations[-1]].name == "scan"
        ]

    @functools.cached_property
    def widens(self) -> bool:
        """Whether any operation is widened."""
        return any(
            operation.widened or (operation.body is not None and operation.body.widens)
            for operation in self.operations
        )

    @functools.cached_property
    def widened(self) -> "Program":
        """The program on a GPU without bfloat16 units; itself, where it needs none."""
        operations = []
        for operation in self.operations:
            if operation.name in CONTRACTIONS:
                kinds = [self.types[value] for value in operation.inputs]
                wide = any(kind.startswith("bfloat16") for kind in kinds)
                operation = dataclasses.replace(operation, widened=wide and len(kinds) == 2)
            elif operation.residuals is not None and operation.body:
                operation = dataclasses.replace(operation, body=operation.body.widened)
            operations.append(operation)
        program = dataclasses.replace(self, operations=tuple(operations))
        return program if program.widens else self

    @functools.cached_property
    def as_written(self) -> "Program":
        """The program as JAX differentiates it, without derivatives of our own: what a user's own
        regions act on. Its gathers scatter."""
        operations = []
        for operation in self.operations:
            if operation.name == "gather":
                operation = dataclasses.replace(operation, fused=False)
            elif operation.body:
                operation = dataclasses.replace(operation, body=operation.body.as_written)
            operations.append(operation)
        return dataclasses.replace(self, operations=tuple(operations))

    def with_loops(self, loops: Mapping[int, tuple[int, int]]) -> "Program":
        """The program with other bytes of residuals, and inside the derivative, of some scans, by
        the numbers of their kernels."""
        sizes, operations = list(self.sizes), list(self.operations)
        for number, (residuals, inside) in loops.items():
            index = self.kernels[number].operations[-1]
            operation = operations[index]
            assert operation.residuals is not None
            sizes[operation.residuals] = residuals
            operations[index] = dataclasses.replace(operation, inside=inside)
        return dataclasses.replace(self, operations=tuple(operations), sizes=tuple(sizes))


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
    for step in flat.steps:
        constant = [not isinstance(one, int) or one in fixed for one in step.inputs]
        if all(constant):
            fixed.update(step.outputs)
        body, residuals, inside = _body(step, constant)
        outputs = step.outputs
        if residuals is not None:
            outputs = (*outputs, len(sizes))
            sizes.append(residuals)
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
                body,
                step.equation.params["length"] if step.primitive == "scan" else 1,
                _carry(step, body),
                outputs[-1] if residuals is not None else None,
                inside,
                batched=is_batched(step.equation),
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


def _body(step: Step, constant: list[bool]) -> tuple[Program | None, int | None, int]:
    """What a scan or a user's region repeats, the bytes of residuals that it keeps (of a scan),
    and the bytes that its derivative takes inside. Some operands are ``constant``."""
    if step.primitive == "scan":
        loop = loop_of(step.equation)
        constant = list(constant)
        constant[loop.carry] = [False] * len(constant[loop.carry])  # the next ones may not be
        body = read_program(loop.body, fixed=_inputs(loop.body, constant))
        made = sum(body.sizes[value] for kernel in body.kernels for value in kernel.results)
        kept = sum(map(size_of, scan_residuals(step.equation, constant)))
        return body, kept * step.equation.params["length"], made
    if is_region(step.equation):
        called = called_jaxpr(step.equation)
        body = read_program(called, fixed=_inputs(called, constant))
        made = sum(body.sizes[value] for kernel in body.kernels for value in kernel.results)
        return body, None, made
    return None, None, 0


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
    return f"{getattr(aval, 'dtype', '')}{list(getattr(aval, 'shape', ()))}"


def size_of(aval) -> int:
    """Bytes of an abstract value."""
    if not hasattr(aval, "shape"):
        return 0  # a token
    return math.prod(aval.shape) * aval.dtype.itemsize
