"""A whole step, forward and backward, as a graph of what is computed from what."""

import dataclasses
import math
from collections.abc import Sequence

from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.forward_backward import merge_common_subexpressions
from jaxmem.jaxprs.nested import loop_of
from jaxmem.program.costs import flops, is_of_vectors

_INPUT = -1  # in the place of the node that makes a value: none by definition


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """What a node reads: all of a value, or, where it is a `scan`'s, the part that its iteration
    takes.

    With an ``initial`` value it is what a loop of ``length`` iterations hands from one to the next:
    the first reads the initial value, every other what the one before it made. ``last`` is what the
    last of them made.
    """

    value: int
    initial: int | None = None
    last: bool = False
    length: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """An operation, in a loop all its iterations together: the FLOPs of all of them, what it reads
    and which values it makes. ``outer`` is one that no loop repeats."""

    flops: int
    reads: tuple[Read, ...]
    makes: tuple[int, ...]
    outer: bool


@dataclasses.dataclass(frozen=True)
class Graph:
    """A step: values by number with their bytes, of a loop those of all iterations, and the node
    that makes each (-1: an input, which is there in any case)."""

    nodes: tuple[Node, ...]
    sizes: tuple[int, ...]
    maker: tuple[int, ...]
    outputs: tuple[Read, ...]

    @property
    def flops(self) -> int:
        """FLOPs of all nodes, each run once."""
        return sum(node.flops for node in self.nodes)


def read_graph(flat: FlatJaxpr) -> Graph:
    """The graph of a flat jaxpr, without what nothing reads; what is computed twice from the same
    values is one node."""
    reading = _Reading()
    inputs: list[Read | None] = [Read(reading.value(0, _INPUT)) for _ in range(flat.input_count)]
    return reading.graph(reading.add(flat, inputs, 1))


class _Reading:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.maker: list[int] = []

    def value(self, size: int, maker: int) -> int:
        self.sizes.append(size)
        self.maker.append(maker)
        return len(self.sizes) - 1

    def add(self, flat: FlatJaxpr, inputs: Sequence[Read | None], times: int) -> list[Read | None]:
        """Adds the steps of a program that runs so many times; what it returns. None is a number
        that is written in the program."""
        flat = merge_common_subexpressions(flat)
        values: dict[int, Read | None] = dict(enumerate(inputs))
        for step in flat.steps:
            operands = [values[one] if isinstance(one, int) else None for one in step.inputs]
            if step.primitive == "scan" and step.equation.params["length"]:
                results = self.scan(step, operands, times)
            else:
                sizes = [_bytes(flat.aval(one)) for one in step.outputs]
                results = self.node(_flops(step), operands, sizes, times)
            values.update(zip(step.outputs, results, strict=True))
        return [values[one] if isinstance(one, int) else None for one in flat.outputs]

    def node(
        self, work: int, operands: Sequence[Read | None], sizes: Sequence[int], times: int
    ) -> list[Read | None]:
        number = len(self.nodes)
        makes = tuple(self.value(size * times, number) for size in sizes)
        reads = tuple(dict.fromkeys(one for one in operands if one is not None))
        self.nodes.append(Node(work * times, reads, makes, times == 1))
        return [Read(value) for value in makes]

    def whole(self, read: Read | None, size: int, times: int) -> Read:
        """The same as a value of its own, where it is none."""
        if read is not None and read.initial is None and not read.last:
            return read
        (found,) = self.node(0, [read], [size], times)
        assert found is not None
        return found

    def scan(
        self, step: FlatStep, operands: Sequence[Read | None], times: int
    ) -> list[Read | None]:
        loop, length = loop_of(step.equation), step.equation.params["length"]
        body, avals = loop.body, [variable.aval for variable in step.equation.invars]
        given: list[Read | None] = [
            None if one is None else self.whole(one, _bytes(aval), times)
            for one, aval in zip(operands, avals, strict=True)
        ]
        constants: list[Read | None] = [Read(self.value(0, _INPUT)) for _ in body.consts]
        carried = []
        for at in range(loop.carry.start, loop.carry.stop):
            initial = self.whole(given[at], _bytes(avals[at]), times)
            handed = self.value(_bytes(avals[at]) * times * length, _INPUT)
            given[at] = Read(handed, initial.value, length=length)
            carried.append(handed)
        results = self.add(body, [*constants, *given], times * length)
        found: list[Read | None] = []
        for handed, result in zip(carried, results, strict=False):
            self.maker[handed] = len(self.nodes)
            reads = () if result is None else (result,)
            self.nodes.append(Node(0, reads, (handed,), False))
            found.append(Read(handed, last=True, length=length))
        sizes = [_bytes(body.aval(one)) for one in body.outputs]
        for result, size in list(zip(results, sizes, strict=True))[len(carried) :]:
            found.append(self.whole(result, size, times * length))
        return found

    def graph(self, outputs: Sequence[Read | None]) -> Graph:
        """What the outputs are made of."""
        wanted = [one for one in outputs if one is not None]
        pending, alive = list(wanted), set[int]()
        while pending:
            read = pending.pop()
            for value in (read.value, read.initial):
                number = _INPUT if value is None else self.maker[value]
                if number != _INPUT and number not in alive:
                    alive.add(number)
                    pending.extend(self.nodes[number].reads)
        numbers = {old: new for new, old in enumerate(sorted(alive))}
        return Graph(
            tuple(self.nodes[old] for old in numbers),
            tuple(self.sizes),
            tuple(numbers.get(maker, _INPUT) for maker in self.maker),
            tuple(wanted),
        )


def _flops(step: FlatStep) -> int:
    """FLOPs of a step; the zeros that a convolution puts between the elements of what it reads, as
    derivatives of strided ones do, are no work. Compilers may count a matmul of vectors as none."""
    if is_of_vectors(step.equation):
        return 0
    dilation = step.equation.params.get("lhs_dilation") or ()
    return flops(step.equation) // math.prod(dilation)


def _bytes(aval) -> int:
    if not hasattr(aval, "shape"):
        return 0  # a token
    return math.prod(aval.shape) * aval.dtype.itemsize
