"""How the values of a program are spread over the devices of a mesh.

XLA asks Shardy, whose propagation of shardings comes with jaxlib. It is asked here too, about the
program as it is written, with all of its values as results (https://openxla.org/shardy).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.flat import FlatJaxpr, Step
from jaxmem.jaxprs.lowering import lower_for
from jaxmem.jaxprs.placement import abstract, of_shape
from jaxmem.targets import FAMILIES

# For each axis of an array the axes of the mesh, or parts of them, that it is cut along, and into
# how many pieces each cuts.
Parts = tuple[tuple[tuple[str, int], ...], ...]
_PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
)
_SHARDING = "sdy.sharding"


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """A value that a step reads in other pieces than it is made in: XLA gathers it first, or sends
    pieces around. ``parts`` are those that the step reads."""

    step: int
    value: int
    parts: Parts


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the values of a flat jaxpr are spread over a mesh; over one device, without one.

    Attributes:
        flat: the jaxpr.
        mesh: a mesh of several devices, or None.
        parts: of each value, by number.
        gathers: what is read in other pieces, by step.
    """

    flat: FlatJaxpr
    mesh: Any = None
    parts: tuple[Parts, ...] = ()
    gathers: tuple[Gather, ...] = ()

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

    def devices(self, step: Step) -> int:
        """Among how many devices the work of an operation is divided: along the axes of what it
        makes, and those that all of its operands are cut along (a matmul's, where it sums up)."""
        if self.mesh is None or step.primitive == "shard_map":  # which is what one device does
            return 1
        operands = [self._axes(value) for value in step.uses]
        along = set().union(*map(self._axes, step.outputs))
        if operands:
            along |= set.intersection(*operands)
        return _count(along)

    def inside(
        self, body: FlatJaxpr, operands: Sequence[Any], first: int | None = None
    ) -> "Spread":
        """How a program inside of a step is spread, given its operands as values of this one or
        literals; ``first`` is the first of those that it is given an element of at a time."""
        if self.mesh is None:
            return Spread(body)
        count = len(operands) if first is None else first
        given = [
            self._sharding(operand, at >= count) if isinstance(operand, int) else None
            for at, operand in enumerate(operands)
        ]
        return spread(body, given, self.mesh)

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


def spread(flat: FlatJaxpr, given: Sequence[Any], mesh: Any = None) -> Spread:
    """How a program is spread whose last inputs have the shardings that are ``given`` (None: not
    known); over the mesh of those that are on several devices, if none is named."""
    mesh = mesh or mesh_of([*given, *_written(flat)])
    if mesh is None:
        return Spread(flat)
    own: list[Any] = [None] * (flat.input_count - len(given))
    if len(own) == len(flat.consts):
        own = [getattr(abstract(one), "sharding", None) for one in flat.consts]
    made = {*range(flat.input_count), *(value for step in flat.steps for value in step.outputs)}
    arrays = [at for at, aval in enumerate(flat.avals) if at in made and hasattr(aval, "shape")]

    def everything(*inputs):
        values = dict(enumerate(inputs))
        flat.run(flat.steps, values)
        return [values[at] for at in arrays]

    module = _lowered(everything, flat.avals, [*own, *given], mesh)
    if module is None:
        return Spread(flat, mesh, tuple(_evenly(aval, mesh) for aval in flat.avals))
    with module.context:
        function = _main(module)
        *_, returned = function.regions[0].blocks[0].operations
        values = dict(zip(arrays, map(_before_return, returned.operands), strict=True))
        given = _shardings(function.attributes["arg_attrs"])
        parts = tuple(
            _parts(_sharding_of(values.get(at), given), len(getattr(aval, "shape", ())), mesh)
            for at, aval in enumerate(flat.avals)
        )
        return Spread(flat, mesh, parts, tuple(_gathers(flat, function, values, parts, mesh)))


def gradient_pieces(flat: FlatJaxpr, given: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """What one device has of the gradients of a program by some of its inputs, where nobody says
    how they are spread; the last inputs have the shardings that are ``given``."""
    own = flat.input_count - len(given)
    avals = flat.avals[: flat.input_count]
    mesh = mesh_of([*given, *_written(flat)])
    moving = [at for at in flat.outputs if isinstance(at, int) and _is_real(flat.avals[at])]

    def gradients(*inputs):
        def run(*chosen):
            values = dict(enumerate(inputs)) | dict(zip(wanted, chosen, strict=True))
            flat.run(flat.steps, values)
            return [values[at] for at in moving]

        results, back = jax.vjp(run, *(inputs[at] for at in wanted))
        return results, back([jnp.ones_like(one) for one in results])

    module = mesh and _lowered(gradients, avals, [*[None] * own, *given], mesh)
    if not module:
        return [avals[at] for at in wanted]
    with module.context:
        found = _shardings(_main(module).attributes["res_attrs"])[len(moving) :]
        parts = [_parts(one, avals[at].ndim, mesh) for at, one in zip(wanted, found, strict=True)]
    whole = Spread(flat, mesh)
    return [whole.aval(at, one) for at, one in zip(wanted, parts, strict=True)]


def _is_real(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact)


def mesh_of(shardings: Iterable[Any]) -> Any:
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


def _lowered(fun: Callable, avals: Sequence[Any], given: Sequence[Any], mesh: Any) -> Any:
    """The module of a function, with shardings of all values, for the first platform that has all
    of its operations; None: there is none."""
    inputs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_on(mesh, one))
        for aval, one in zip(avals, given, strict=False)
    ]
    traced = jax.jit(fun, keep_unused=True).trace(*inputs)
    for family in FAMILIES.values():
        try:
            module = lower_for(traced, family.platform).compiler_ir("stablehlo")
        except Exception:  # a kernel may raise anything where it cannot be lowered
            continue
        with module.context:
            module = module.operation.clone()
            for passes in _PASSES:
                internals.PassManager.parse(passes).run(module)
        return module
    return None


def _on(mesh: Any, sharding: Any) -> Any:
    """A sharding over a mesh, without the kind of memory; None: it is over another, or none."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return NamedSharding(sharding.mesh, sharding.spec)
    return None


def _main(module) -> Any:
    found = (one for one in module.regions[0].blocks[0].operations if "sym_name" in one.attributes)
    return next(one for one in found if one.attributes["sym_name"].value == "main")


def _shardings(attributes) -> list[Any]:
    """What the attributes of arguments or results say of shardings; None: nothing."""
    name = _SHARDING
    return [one[name] if name in one else None for one in attributes]  # noqa: SIM401 (no dict)


def _gathers(
    flat: FlatJaxpr, function: Any, values: Mapping[int, Any], parts: Sequence[Parts], mesh: Any
) -> Iterator[Gather]:
    numbers: dict[Any, list[int]] = {}
    for number, value in values.items():
        numbers.setdefault(value, []).append(number)
    maker = {value: at for at, step in enumerate(flat.steps) for value in step.outputs}
    for operation in function.regions[0].blocks[0].operations:
        if operation.name != "sdy.reshard":
            continue
        source = numbers.get(operation.operands[0], ())
        rank = len(operation.result.type.shape)
        wanted = _parts(operation.attributes["sharding"], rank, mesh)
        for result in _first(operation.result, numbers):
            step = maker.get(result)
            if step is None:
                continue
            read = next((one for one in source if one in flat.steps[step].inputs), None)
            if read is not None and parts[read] != wanted:
                yield Gather(step, read, wanted)


def _before_return(value: Any) -> Any:
    """A value as it is made: an axis that does not divide by its devices is gathered for the
    return alone."""
    while not _is_argument(value) and value.owner.name == "sdy.reshard":
        if any(use.owner.name != "func.return" for use in value.uses):
            break
        value = value.owner.operands[0]
    return value


def _sharding_of(value: Any, given: Sequence[Any]) -> Any:
    """What is said of a value's sharding, where it is made; None: nothing."""
    if value is None:
        return None
    if _is_argument(value):
        return given[list(value.owner.arguments).index(value)]
    said = value.owner.attributes
    if value.owner.name.startswith("sdy."):
        for name in ("sharding", "out_sharding"):
            if name in said:
                return said[name]
    for name in (_SHARDING, "out_shardings"):  # of all results
        if name in said:
            number = list(value.owner.results).index(value)
            return internals.sdy.TensorShardingPerValueAttr(said[name]).shardings[number]
    return None


def _is_argument(value: Any) -> bool:
    """Whether a value is what the function takes: a block has it, and no operation."""
    return hasattr(value.owner, "arguments")


def _first(value: Any, numbers: Mapping[Any, Sequence[int]]) -> set[int]:
    """The values of a jaxpr that are made of one of its module, with none of it between."""
    found: set[int] = set()
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        if one in numbers:
            found.update(numbers[one])
        elif one not in seen:
            seen.add(one)
            for use in one.uses:
                pending.extend(_outermost(use.owner).results)
    return found


def _outermost(operation: Any) -> Any:
    """The operation of the function that an operation is in."""
    while operation.parent is not None and operation.parent.name != "func.func":
        operation = operation.parent
    return operation


def _parts(sharding: Any, rank: int, mesh: Any) -> Parts:
    if sharding is None:
        return ((),) * rank
    cuts = internals.sdy.TensorShardingAttr(sharding).dimension_shardings
    axes = (internals.sdy.DimensionShardingAttr(cut).axes for cut in cuts)
    return tuple(tuple(_axis(internals.sdy.AxisRefAttr(one), mesh) for one in cut) for cut in axes)


def _axis(axis: Any, mesh: Any) -> tuple[str, int]:
    part = axis.sub_axis_info
    if part is None:
        return axis.name, mesh.shape[axis.name]
    part = internals.sdy.SubAxisInfoAttr(part)
    return f"{axis.name}:{part.pre_size}:{part.size}", part.size


def _evenly(aval: Any, mesh: Any) -> Parts:
    """Along the longest axis, where Shardy cannot be asked."""
    shape = getattr(aval, "shape", ())
    longest = max(range(len(shape)), key=shape.__getitem__, default=-1)
    every = (("", mesh.size),)
    return tuple(every if at == longest else () for at in range(len(shape)))


def _count(axes: Iterable[tuple[str, int]]) -> int:
    return math.prod(size for _, size in axes)
