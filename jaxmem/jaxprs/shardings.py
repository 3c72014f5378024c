"""How the values of a program are spread over the devices of a mesh.

Shardy is asked about the program as it is written, with all of its values as results.
"""

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep
from jaxmem.jaxprs.mapped import automatic_axes
from jaxmem.jaxprs.nested import loop_of
from jaxmem.jaxprs.operands import has_derivative
from jaxmem.jaxprs.placement import abstract, of_shape
from jaxmem.jaxprs.shardy import Part, Parts, Propagated, propagated
from jaxmem.targets.links import Ring

_NONE: Mapping[int, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """A value that a step reads in other pieces than it is made in: XLA gathers it first, or sends
    pieces around, in a ring. ``parts`` are those that the step reads."""

    step: int
    value: int
    parts: Parts
    ring: Ring


@dataclasses.dataclass(frozen=True)
class Shardings:
    """How the values of a flat jaxpr are spread over a mesh; over one device, without one.

    Attributes:
        flat: the jaxpr.
        mesh: a mesh of several devices, or None.
        parts: of each value, by number.
        reshards: what is read in other pieces, by step.
    """

    flat: FlatJaxpr
    mesh: Any = None
    parts: tuple[Parts, ...] = ()
    reshards: tuple[Reshard, ...] = ()

    def aval(self, value: int, parts: Parts | None = None) -> Any:
        """The piece of a value that one device has: the largest, where they differ. In pieces of
        its own, or those given."""
        whole = self.flat.avals[value]
        parts = parts or (self.parts[value] if self.parts else ())
        if not any(parts):
            return whole
        counts = map(_count, parts)
        shape = (-(-size // count) for size, count in zip(whole.shape, counts, strict=False))
        return of_shape(whole, tuple(shape))

    def devices(self, step: FlatStep) -> int:
        """Among how many devices the work of an operation is divided: along the axes of what it
        makes, and those that all of its operands are cut along (a matmul's, where it sums up)."""
        if self.mesh is None or step.primitive == "shard_map":  # which is what one device does
            return 1
        operands = [self._axes(value) for value in step.uses]
        along = set().union(*map(self._axes, step.outputs))
        if operands:
            along |= set.intersection(*operands)
        return _count(along)

    def summed(self, step: FlatStep) -> Ring | None:
        """Among which devices the result of a matmul is summed up: those that both of its operands
        are cut over along what it sums; None: there are none."""
        if self.mesh is None or step.primitive != "dot_general" or len([*step.uses]) < 2:
            return None
        contracted, _ = step.equation.params["dimension_numbers"]
        axes = [
            {axis for at in along for axis in self.parts[value][at]}
            for value, along in zip(step.uses, contracted, strict=False)
        ]
        both = axes[0] & axes[1]
        return ring(self.mesh, both) if both else None

    def aligned(self, step: FlatStep) -> bool:
        """Whether each device has of a slice the places that it has of what that is taken of: it
        begins there and ends so little sooner that its pieces are as large, the last one padded."""
        if self.mesh is None or step.primitive != "slice":
            return False
        (value,), given = step.inputs, step.equation.params
        (made,) = step.outputs
        if not isinstance(value, int) or any(given["start_indices"]):
            return False
        if set(given["strides"] or [1]) != {1} or self.parts[made] != self.parts[value]:
            return False
        return self.aval(made).shape == self.aval(value).shape

    def mapped(self, step: FlatStep, body: FlatJaxpr) -> "Shardings":
        """How a program inside of a `jax.shard_map` is spread, of which it has the pieces."""
        automatic = automatic_axes(step.equation)
        if self.mesh is None or not automatic:
            return Shardings(body)
        cut = {axis for value in step.uses for axis in self._axes(value) if axis[0] in automatic}
        return AssumedEvenShardings.of(body, self.mesh, tuple(sorted(cut)))

    def inside(
        self, body: FlatJaxpr, operands: Sequence[Any], alike: Mapping[int, int] = _NONE
    ) -> "Shardings":
        """How a program inside of a step is spread, given its operands as values of this one or
        literals; ``alike`` are values of the body that lie as operands do, with the places of
        those."""
        return self._inside(body, operands, len(operands), alike)

    def for_iteration(self, scan: FlatStep, body: FlatJaxpr) -> "Shardings":
        """How the body of a scan is spread; of some operands it has an element at a time."""
        return self._inside(body, scan.inputs, loop_of(scan.equation).carry.stop, _NONE)

    def _inside(
        self, body: FlatJaxpr, operands: Sequence[Any], whole: int, alike: Mapping[int, int]
    ) -> "Shardings":
        if self.mesh is None:
            return Shardings(body)
        given = [
            self._sharding(operand, at >= whole) if isinstance(operand, int) else None
            for at, operand in enumerate(operands)
        ]
        if AxisType.Explicit in self.mesh.axis_types:
            alike = _NONE  # types say how each value lies, and JAX takes no constraints
        pairs = ((value, given[at]) for value, at in alike.items())
        asked = {value: one for value, one in pairs if one is not None and any(one.spec)}
        return propagate_shardings(body, given, self.mesh, asked)

    def _axes(self, value: int) -> set[tuple[str, int]]:
        return {axis for part in self.parts[value] for axis in part}

    def _sharding(self, value: int, element: bool) -> NamedSharding:
        """Of a value, or of its elements; JAX takes nothing else than whole axes that divide."""
        parts, shape = self.parts[value], self.flat.avals[value].shape
        whole = [
            tuple(name for name, _ in part if name in self.mesh.shape)
            if length % _count(part) == 0
            else ()
            for part, length in zip(parts, shape, strict=False)
        ]
        return NamedSharding(self.mesh, PartitionSpec(*whole[element:]))


@dataclasses.dataclass(frozen=True)
class AssumedEvenShardings(Shardings):
    """Of what is inside of a `jax.shard_map`, where Shardy cannot be asked: every value is cut
    along its longest axis, over the axes of the mesh that are left to the compiler and that
    anything the `jax.shard_map` takes is cut over."""

    axes: Part = ()

    @classmethod
    def of(cls, flat: FlatJaxpr, mesh: Any, axes: Part) -> "AssumedEvenShardings":
        return cls(flat, mesh, tuple(_evenly(aval, axes) for aval in flat.avals), (), axes)

    def _inside(
        self, body: FlatJaxpr, operands: Sequence[Any], whole: int, alike: Mapping[int, int]
    ) -> Shardings:
        return AssumedEvenShardings.of(body, self.mesh, self.axes)


def propagate_shardings(
    flat: FlatJaxpr, given: Sequence[Any], mesh: Any = None, asked: Mapping[int, Any] = _NONE
) -> Shardings:
    """How a program is spread whose last inputs have the shardings that are ``given`` (None: not
    known), and of whose values some are ``asked`` to have others; over the mesh of those that are
    on several devices, if none is named."""
    mesh = mesh or _mesh_of([*given, *_written(flat)])
    if mesh is None:
        return Shardings(flat)
    own: list[Any] = [None] * (flat.input_count - len(given))
    if len(own) == len(flat.consts):
        own = [getattr(abstract(one), "sharding", None) for one in flat.consts]
    made = {*range(flat.input_count), *(value for step in flat.steps for value in step.outputs)}
    arrays = [at for at, aval in enumerate(flat.avals) if at in made and hasattr(aval, "shape")]

    def everything(*inputs):
        values = dict(enumerate(inputs))
        flat.run(flat.steps, values)
        values |= {
            at: jax.lax.with_sharding_constraint(values[at], one) for at, one in asked.items()
        }
        return [values[at] for at in arrays]

    found = propagated(everything, flat.avals, [*own, *given], mesh)
    if found is None:
        return Shardings(
            flat, mesh, tuple(_evenly(aval, (("", mesh.size),)) for aval in flat.avals)
        )
    parts: list[Parts] = [((),) * len(getattr(aval, "shape", ())) for aval in flat.avals]
    for at, one in zip(arrays, found.results(), strict=True):
        parts[at] = one
    _shard_as_read(flat, parts)
    return Shardings(flat, mesh, tuple(parts), tuple(_reshards(flat, found, arrays, parts, mesh)))


def _shard_as_read(flat: FlatJaxpr, parts: list[Parts]) -> None:
    """Values that are made of no input, such as the zeros that a loop begins with, are made in the
    pieces in which they are read, anew for each reader: as results, which they are where Shardy is
    asked, they would be whole. Here they are in the largest of those pieces that are known: of the
    results of the same shape, and for a loop of what it carries."""
    made: set[int] = set()
    for step in flat.steps:
        if not set(step.uses) - made and not step.equation.effects:
            made.update(step.outputs)
    readers: dict[int, list[Parts]] = {value: [] for value in made}
    for step in reversed(flat.steps):
        for value in step.outputs:
            found = readers.get(value, ())
            if found and not any(parts[value]) and all(map(any, found)):
                parts[value] = min(found, key=lambda one: _count(x for cut in one for x in cut))
        for at, value in enumerate(step.inputs):
            if isinstance(value, int) and value in made:
                shape = flat.avals[value].shape
                readers[value].append(
                    next(
                        (
                            parts[out]
                            for out in _results_like(step, at)
                            if flat.avals[out].shape == shape
                        ),
                        (),
                    )
                )


def _results_like(step: FlatStep, at: int) -> Sequence[int]:
    """The results of a step that lie as one of its operands does, if they have its shape."""
    if step.primitive not in ("scan", "while"):
        return step.outputs
    loop = loop_of(step.equation)
    carried = at - loop.carry.start
    return step.outputs[carried : carried + 1] if carried >= 0 and at < loop.carry.stop else ()


def gradient_shards(flat: FlatJaxpr, given: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """What one device has of the gradients of a program by some of its inputs, where nobody says
    how they are spread; the last inputs have the shardings that are ``given``."""
    own = flat.input_count - len(given)
    avals = flat.avals[: flat.input_count]
    mesh = _mesh_of([*given, *_written(flat)])
    moving = [at for at in flat.outputs if isinstance(at, int) and has_derivative(flat.avals[at])]

    def gradients(*inputs):
        def run(*chosen):
            values = dict(enumerate(inputs)) | dict(zip(wanted, chosen, strict=True))
            flat.run(flat.steps, values)
            return [values[at] for at in moving]

        results, back = jax.vjp(run, *(inputs[at] for at in wanted))
        return results, back([jnp.ones_like(one) for one in results])

    found = mesh and propagated(gradients, avals, [*[None] * own, *given], mesh)
    if not found:
        return [avals[at] for at in wanted]
    parts = found.returned()[len(moving) :]
    whole = Shardings(flat, mesh)
    return [whole.aval(at, one) for at, one in zip(wanted, parts, strict=True)]


def _mesh_of(shardings: Iterable[Any]) -> Any:
    """The mesh of several devices that some arrays are spread over, or None."""
    meshes = (one.mesh for one in shardings if isinstance(one, NamedSharding))
    return next((one for one in meshes if one.size > 1), None)


def _written(flat: FlatJaxpr) -> Iterator[Any]:
    """The shardings that a program itself asks for."""
    for step in flat.steps:
        given = step.equation.params
        if step.primitive == "shard_map":
            yield NamedSharding(given["mesh"], PartitionSpec())
        else:
            yield given.get("sharding")


def _reshards(
    flat: FlatJaxpr, found: Propagated, arrays: Sequence[int], parts: Sequence[Parts], mesh: Any
) -> Iterator[Reshard]:
    """Where a step reads a value in other pieces than it is made in; ``arrays`` are the values that
    are results of what Shardy was asked about."""
    maker = {value: step for step, one in enumerate(flat.steps) for value in one.outputs}
    for reshard in found.reshards():
        source = [arrays[at] for at in reshard.results]
        for step in {maker[arrays[at]] for at in reshard.reads if arrays[at] in maker}:
            read = next((one for one in source if one in flat.steps[step].inputs), None)
            if read is not None and parts[read] != reshard.parts:
                had, wanted = _axes_of(parts[read]), _axes_of(reshard.parts)
                among = ring(mesh, had - wanted or had | wanted)
                yield Reshard(step, read, reshard.parts, among)


def ring(mesh: Any, axes: Iterable[tuple[str, int]]) -> Ring:
    """The devices along some axes of a mesh, or parts of axes, as they are numbered: row by row."""
    names = list(mesh.shape)
    sizes = [mesh.shape[name] for name in names]
    apart = {name: math.prod(sizes[at + 1 :]) for at, name in enumerate(names)}
    axes = list(axes)
    found = [apart[name.partition(":")[0]] for name, _ in axes if name.partition(":")[0] in apart]
    return Ring(_count(axes), min(found, default=1))


def _axes_of(parts: Parts) -> set[tuple[str, int]]:
    return {axis for part in parts for axis in part}


def _evenly(aval: Any, axes: Part) -> Parts:
    """Along the longest axis, where Shardy cannot be asked."""
    shape = getattr(aval, "shape", ())
    longest = max(range(len(shape)), key=shape.__getitem__, default=-1)
    return tuple(axes if at == longest else () for at in range(len(shape)))


def _count(axes: Iterable[tuple[str, int]]) -> int:
    return math.prod(size for _, size in axes)
