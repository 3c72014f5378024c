"""The plain data that planners work on."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Hashable, Mapping
from typing import Any

from jaxmem.program.convolutions import NO_COPIES, ConvolutionCopies
from jaxmem.program.costs import OperandAxes
from jaxmem.program.cotangents import (
    KernelEdges,
    active_of,
    cotangent_edges,
    cotangents_in_common,
)
from jaxmem.program.float32 import computed_in_float32, in_float32
from jaxmem.program.input_gradients import InputGradients
from jaxmem.program.kernel import Kernel
from jaxmem.program.kernels import read_kernels
from jaxmem.program.opaque import JointProgram
from jaxmem.program.readers import gathers_repeatedly
from jaxmem.program.stacks import NO_STACKS, LoopStacks
from jaxmem.targets import Rules
from jaxmem.targets.links import Ring

_PLAIN = Rules()
_RESULTS = InputGradients()


@dataclasses.dataclass(frozen=True, slots=True)
class Contraction:
    """What is particular to a matmul, a convolution, a gather or a pooling.

    Attributes:
        batched: whether a matmul has batch dimensions, as attention's scores have.
        vectors: whether one operand of a matmul has no axes but those of the batch and those that
            are summed.
        slides: the axes of its result that a convolution slides along.
        copies: those that a library reads for a convolution.
        axes: of the operand of a convolution, and of its kernel: that of the examples (results),
            that of the channels, and those that it slides along.
        precision: how exactly it multiplies float32 (`precision_of`).
        operands: the axes of each operand of a matmul.
        batch_axes: along how many axes a gather takes of each slice of its operand by indices of
            its own: XLA writes the numbers of the slices beside these.
        overlaps: whether the windows of a pooling overlap.
    """

    batched: bool = False
    vectors: bool = False
    slides: frozenset[int] = frozenset()
    copies: ConvolutionCopies = NO_COPIES
    axes: tuple[tuple[int, ...], ...] = ()
    precision: str = "default"
    operands: tuple[OperandAxes, ...] = ()
    batch_axes: int = 0
    overlaps: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """What devices send each other for an operation.

    Attributes:
        gathers: operands that they send each other first: the value as it is made, and as it is
            read, and among which devices.
        summed: among which devices a matmul is summed, that are cut along what it sums.
        aligned: whether a slice lies on each device where what it is taken of does.
    """

    gathers: tuple[tuple[int, int, Ring], ...] = ()
    summed: Ring | None = None
    aligned: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where an operation comes from in the user's code.

    Attributes:
        path: of the module (``ResNet/Block_3/Conv_1``).
        line: of the user's source.
        calls: the primitives inside of a call that is fused.
        merged: whether it stands there several times.
        derivative_calls: the primitives by which its own rule makes what its derivative reads.
        operand_reads: how many of XLA's operations read what it is of.
    """

    path: str = ""
    line: str = ""
    calls: tuple[str, ...] = ()
    merged: bool = False
    derivative_calls: tuple[str, ...] = ()
    operand_reads: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation: the values it reads and makes (by number), its FLOPs, whether XLA fuses it
    with its neighbours, what its derivative reads (``"nothing"``, its ``"result"``, its
    ``"operands"``, or some of those; ``"flat"``: it has none; see `derivative_reads`), and where it
    came from.

    A `scan` also has ``body``, what it repeats ``length`` times; ``carry`` are the inputs of the
    body that one iteration hands to the next. A user's own `jax.checkpoint` has the ``body`` that
    its derivative runs again, a `jax.shard_map` the one of each device. A scan, what is opaque (a
    conditional, a rule of the user's own), and a region whose policy saves something makes one
    value more than it returns: its ``residuals``, what it keeps for the backward pass beside
    operands and results; ``stacks`` are a scan's. ``reads`` are those of them that its derivative
    reads, where that is known exactly. ``derivative_workspace`` are bytes that the derivative takes
    beside all of that, ``workspace`` those that the operation takes. Of what is opaque all these
    are by ``joint``: itself and its derivative. A ``widened`` one is computed in float32, from
    copies of what it reads.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    fused: bool
    derivative_reads: str
    source: Source = Source()
    body: "Program | None" = None
    length: int = 1
    carry: tuple[int, ...] = ()
    residuals: int | None = None
    derivative_workspace: int = 0
    workspace: int = 0
    reads: frozenset[int] | None = None
    widened: bool = False
    stacks: LoopStacks = NO_STACKS
    contraction: Contraction = Contraction()
    communication: Communication = Communication()
    joint: JointProgram | None = None

    @property
    def path(self) -> str:
        """That of the module."""
        return self.source.path

    @property
    def line(self) -> str:
        """That of the user's source."""
        return self.source.line

    def gathered_operand(self, value: int) -> int:
        """An operand as it is read, where devices send it each other first."""
        return next((new for old, new, _ in self.communication.gathers if old == value), value)

    @property
    def is_region(self) -> bool:
        """Whether it is a user's own `jax.checkpoint`."""
        return self.body is not None and self.name not in ("scan", "shard_map")


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in order, and the bytes and types of every value. Values below ``input_count``
    are the function's inputs, which live in any case; ``differentiated`` are those of them that
    gradients are taken of (None: all), ``inlined_checkpoints`` is how many regions of the user's
    own were written in place. Sizes and kernels are those that a compiler makes by ``rules``. On
    several devices sizes, types and costs are those of one, and ``whole_sizes`` and ``whole_types``
    those of all devices together: kernels are told by them, so that they are the same ones wherever
    the function is traced. ``input_gradients`` says what becomes of the gradients.
    ``as_jax_derives``: without derivatives of our own. ``in_loop``: it is the body of a loop, of
    which XLA sees the derivative without it. ``policy_saves`` are the values that the policy of a
    user's own region saves, whose body it is. ``handed_on`` are values in memory because a region,
    or a turn of a loop, hands them on. ``has_plainer_gathers``: whether gathers of it are written
    as what they are, which XLA is not told of the function as it is."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    input_count: int
    outputs: tuple[int, ...]
    types: tuple[str, ...] = ()
    differentiated: frozenset[int] | None = None
    inlined_checkpoints: int = 0
    rules: Rules = _PLAIN
    whole_sizes: tuple[int, ...] = ()
    whole_types: tuple[str, ...] = ()
    input_gradients: InputGradients = _RESULTS
    as_jax_derives: bool = False
    in_loop: bool = False
    policy_saves: frozenset[int] = frozenset()
    handed_on: frozenset[int] = frozenset()
    has_plainer_gathers: bool = False

    @functools.cached_property
    def input_bytes(self) -> int:
        """Bytes of all inputs that are read, as `jax.jit` keeps no other, or have gradients."""
        read = set(range(self.input_count) if self.differentiated is None else self.differentiated)
        read.update(self.outputs, *(operation.inputs for operation in self.operations))
        return sum(self.sizes[value] for value in read if value < self.input_count)

    @functools.cached_property
    def boundary_bytes(self) -> int:
        """Bytes of inputs, outputs and, where they are results, gradients: XLA holds them from the
        first kernel of ``value_and_grad`` to the last."""
        active, results = self.active, self.input_gradients.become == "results"
        wanted = (value for value in range(self.input_count) if results and active[value])
        gradients = sum(gradient_size(self, value) for value in wanted)
        return self.input_bytes + gradients + sum(self.sizes[v] for v in set(self.outputs))

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of all matmuls and convolutions."""
        return sum(operation.flops for operation in self.operations)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of operations, connections and sizes: a plan belongs to one of them, whatever it
        is differentiated by, which says what residuals there are."""
        unsharded = self.unsharded
        residuals = {operation.residuals for operation in self.operations}
        values = itertools.zip_longest(unsharded.sizes, unsharded.types)
        own = [one for number, one in enumerate(values) if number not in residuals]
        digest = hashlib.sha256(repr((own, self.input_count, self.outputs)).encode())
        for operation in self.operations:
            made = [value for value in operation.outputs if value != operation.residuals]
            digest.update(repr((operation.name, operation.inputs, made)).encode())
            if operation.body:
                digest.update(operation.body.fingerprint.encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def unsharded(self) -> "Program":
        """The program with the sizes of all devices together."""
        if not self.whole_sizes:
            return self
        operations = (
            dataclasses.replace(
                one, communication=Communication(), body=one.body and one.body.unsharded
            )
            for one in self.operations
        )
        return dataclasses.replace(
            self,
            operations=tuple(operations),
            sizes=self.whole_sizes,
            types=self.whole_types,
            whole_sizes=(),
            whole_types=(),
        )

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
        return active_of(self)

    @functools.cached_property
    def cotangent_of(self) -> list[int]:
        """For each value the first one that has the same cotangent."""
        return cotangents_in_common(self)

    @functools.cached_property
    def cotangent_edges(self) -> tuple[KernelEdges, ...]:
        """How the derivative of each kernel gives its sources cotangents."""
        return cotangent_edges(self)

    def operation_of(self, kernel: int) -> Operation:
        """The operation that completes a kernel."""
        return self.operations[self.kernels[kernel].operations[-1]]

    def body_of(self, kernel: int) -> "Program":
        """The program that a scan repeats, or that a `jax.shard_map` has for each device."""
        body = self.operation_of(kernel).body
        assert body is not None
        return body

    def residual_bytes(self, kernel: int) -> int:
        """Bytes of the residuals of a scan."""
        value = self.kernels[kernel].residuals
        return 0 if value is None else self.sizes[value]

    @functools.cached_property
    def scans(self) -> list[int]:
        """Numbers of the kernels that are a `scan` that runs."""
        return self._with_body("scan")

    @functools.cached_property
    def maps(self) -> list[int]:
        """Numbers of the kernels that are a `jax.shard_map` whose program is planned."""
        return self._with_body("shard_map")

    def _with_body(self, name: str) -> list[int]:
        return [
            index
            for index, kernel in enumerate(self.kernels)
            if (last := self.operation_of(index)).name == name and last.length and last.body
            if not kernel.sent_bytes
        ]

    @functools.cached_property
    def regions(self) -> frozenset[int]:
        """Numbers of the kernels that are regions of the user's own."""
        numbers = (n for n, kernel in enumerate(self.kernels) if not kernel.sent_bytes)
        return frozenset(n for n in numbers if self.operation_of(n).is_region)

    @functools.cached_property
    def loops(self) -> list[int]:
        """Numbers of the kernels that have a program inside which is planned, in order."""
        return sorted(self.scans + self.maps)

    @functools.cached_property
    def widens_bfloat16(self) -> bool:
        """Whether any operation is widened."""
        return any(
            operation.widened or (operation.body is not None and operation.body.widens_bfloat16)
            for operation in self.operations
        )

    @functools.cached_property
    def widened(self) -> "Program":
        """The program on a device without bfloat16 units; itself, where it needs none."""
        program = computed_in_float32(self)
        return program if program.widens_bfloat16 else self

    @functools.cached_property
    def cache(self) -> dict[Hashable, Any]:
        """What others have found out about it, once."""
        return {}

    @functools.cached_property
    def as_written(self) -> "Program":
        """The program as JAX differentiates it, without derivatives of our own: what a user's own
        regions act on. Its gathers scatter. What is computed in float32 is kept so: XLA leaves out
        what rounds it and widens it again."""
        operations, wide = [], set()
        for operation in self.operations:
            if operation.widened:
                wide.update(set(operation.outputs) - set(self.outputs))
            if operation.name == "gather" and not gathers_repeatedly(self, operation):
                operation = dataclasses.replace(operation, fused=False)
            elif operation.body:
                operation = dataclasses.replace(operation, body=operation.body.as_written)
            operations.append(operation)
        found = dataclasses.replace(self, operations=tuple(operations), as_jax_derives=True)
        return in_float32(found, wide) if wide else found

    def with_loops(self, loops: Mapping[int, tuple[int, int, bool]]) -> "Program":
        """The program with other bytes of residuals, and inside the derivative, of some scans, by
        the numbers of their kernels; and whether they run again, from what they read."""
        sizes, operations = list(self.sizes), list(self.operations)
        kernels = list(self.kernels)
        for number, (residuals, inside, again) in loops.items():
            kernel, index = kernels[number], kernels[number].operations[-1]
            operation = operations[index]
            assert operation.residuals is not None
            read = [value for value in kernel.sources if value not in operation.stacks.unread]
            kernels[number] = dataclasses.replace(
                kernel,
                reads=(*read, operation.residuals) if again else kernel.reads,
                moved=kernel.moved + residuals - sizes[operation.residuals],
                derivative_workspace=kernel.derivative_workspace
                + inside
                - operation.derivative_workspace,
            )
            sizes[operation.residuals] = residuals
            operations[index] = dataclasses.replace(operation, derivative_workspace=inside)
        found = dataclasses.replace(self, operations=tuple(operations), sizes=tuple(sizes))
        # No kernel reads these bytes but the derivative of the loop: nothing is read again.
        alike = ("made", "last_used", "active", "scans", "maps")
        vars(found).update({name: getattr(self, name) for name in alike}, kernels=tuple(kernels))
        return found


def gradient_size(program: Program, value: int) -> int:
    """Bytes of the gradient by an input, once it is complete."""
    return program.input_gradients.sizes.get(value, program.sizes[value])
