"""The plain data that planners work on."""

import dataclasses
import functools
import hashlib
import math

from jaxmem._jax import FlatJaxpr
from jaxmem.program._costs import CONTRACTIONS, derivative_reads, flops, is_fused


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation: the values it reads and makes (by number), its FLOPs, whether XLA fuses it
    with its neighbours, what its derivative reads (``"nothing"``, its ``"result"`` or its
    ``"operands"``), and the module path it came from (``ResNet/Block_3/Conv_1``)."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int
    fused: bool
    derivative_reads: str
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in order, and the bytes and types of every value. Values below ``input_count``
    are the function's inputs, which live in any case."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    input_count: int
    outputs: tuple[int, ...]
    types: tuple[str, ...] = ()

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
        return digest.hexdigest()[:16]

    @functools.cached_property
    def made(self) -> list[int]:
        """For each value the number of operations that have run once it exists (0: an input)."""
        position = [0] * len(self.sizes)
        for index, operation in enumerate(self.operations):
            for value in operation.outputs:
                position[value] = index + 1
        return position

    @functools.cached_property
    def last_used(self) -> list[int]:
        """For each value the number of operations that have run after its last use; a value never
        read dies where it is made, an output of the program outlives every operation."""
        position = list(self.made)
        for index, operation in enumerate(self.operations):
            for value in operation.inputs:
                position[value] = index + 1
        for value in self.outputs:
            position[value] = len(self.operations) + 1
        return position

    def recompute_flops(self, start: int, stop: int) -> int:
        """FLOPs that the backward pass of operations ``start`` to ``stop - 1`` does again if only
        what enters them is kept: of those whose results a derivative among them reads."""
        needed: set[int] = set()
        total = 0
        for operation in reversed(self.operations[start:stop]):
            again = not needed.isdisjoint(operation.outputs)
            total += operation.flops * again
            if again or operation.derivative_reads != "nothing":
                needed.update(operation.inputs)
            if operation.flops and operation.name not in CONTRACTIONS and not again:
                total += operation.flops  # a scan, say: its derivative reads what is inside it
        return total

    @functools.cached_property
    def materialised(self) -> list[bool]:
        """For each value whether it goes to memory: what a dear operation reads or makes does,
        what lives between fused ones does not."""
        stored = [False] * len(self.sizes)
        for operation in self.operations:
            if not operation.fused:
                for value in (*operation.inputs, *operation.outputs):
                    stored[value] = True
        return stored

    @functools.cached_property
    def residual(self) -> list[bool]:
        """For each value whether the plain forward pass keeps it for the backward pass: it is
        materialised, and a derivative reads it or what XLA fuses onto it."""
        stored = self.materialised
        read = [False] * len(self.sizes)
        for operation in self.operations:
            by = operation.derivative_reads
            for value in {"nothing": (), "result": operation.outputs}.get(by, operation.inputs):
                read[value] = True
        for operation in reversed(self.operations):
            if any(read[value] and not stored[value] for value in operation.outputs):
                for value in operation.inputs:
                    read[value] = True
        return [kept and wanted for kept, wanted in zip(stored, read, strict=True)]


def read_program(flat: FlatJaxpr) -> Program:
    """The operations of a flat jaxpr as plain data."""
    operations = tuple(
        Operation(
            step.primitive,
            tuple(step.uses),
            step.outputs,
            flops(step.equation),
            is_fused(step.equation),
            derivative_reads(step.equation),
            str(step.name_stack),
        )
        for step in flat.steps
    )
    outputs = tuple(value for value in flat.outputs if isinstance(value, int))
    sizes = tuple(map(size_of, flat.avals))
    types = tuple(_type_of(aval) for aval in flat.avals)
    return Program(operations, sizes, flat.input_count, outputs, types)


def _type_of(aval) -> str:
    return f"{getattr(aval, 'dtype', '')}{list(getattr(aval, 'shape', ()))}"


def size_of(aval) -> int:
    """Bytes of an abstract value."""
    if not hasattr(aval, "shape"):
        return 0  # a token
    return math.prod(aval.shape) * aval.dtype.itemsize
