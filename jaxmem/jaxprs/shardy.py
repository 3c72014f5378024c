"""What Shardy says of how the values of a function are spread over the devices of a mesh.

XLA asks Shardy, whose propagation of shardings comes with jaxlib (https://openxla.org/shardy). So
does jaxmem: it lowers the function, runs those passes over its module, and reads them there.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.lowering import lower_for
from jaxmem.targets import FAMILIES

# For each axis of an array the axes of the mesh, or parts of them, that it is cut along, and into
# how many pieces each cuts.
Part = tuple[tuple[str, int], ...]
Parts = tuple[Part, ...]
_PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
)
_SHARDING = "sdy.sharding"


@dataclasses.dataclass(frozen=True, slots=True)
class ResultReshard:
    """Results of a function that are one value, which is read in other pieces than it is made in;
    ``reads`` are the results that are made of those pieces, with no result between."""

    results: tuple[int, ...]
    reads: frozenset[int]
    parts: Parts


class Propagated:
    """A function over a mesh with the shardings that Shardy gives its values."""

    def __init__(self, module: Any, mesh: Any):
        self._module, self._mesh = module, mesh
        with module.context:
            self._main = _main(module)
            *_, returned = self._main.regions[0].blocks[0].operations
            self._results = [_before_return(one) for one in returned.operands]

    def results(self) -> list[Parts]:
        """How each result is spread where it is made."""
        with self._module.context:
            given = _of_each(self._main.attributes["arg_attrs"])
            return [
                self._parts(_sharding_of(value, given), len(value.type.shape))
                for value in self._results
            ]

    def returned(self) -> list[Parts]:
        """How each result is spread where it is returned."""
        with self._module.context:
            found = _of_each(self._main.attributes["res_attrs"])
            return [
                self._parts(one, len(value.type.shape))
                for one, value in zip(found, self._results, strict=True)
            ]

    def reshards(self) -> Iterator[ResultReshard]:
        """Where pieces are sent around between what makes a value and what reads it."""
        numbers: dict[Any, tuple[int, ...]] = {}
        for number, value in enumerate(self._results):
            numbers[value] = (*numbers.get(value, ()), number)
        with self._module.context:
            for operation in self._main.regions[0].blocks[0].operations:
                source = operation.name == "sdy.reshard" and numbers.get(operation.operands[0])
                if source:
                    rank = len(operation.result.type.shape)
                    parts = self._parts(operation.attributes["sharding"], rank)
                    reads = {one for value in _next(operation.result, numbers) for one in value}
                    yield ResultReshard(source, frozenset(reads), parts)

    def _parts(self, sharding: Any, rank: int) -> Parts:
        if sharding is None:
            return ((),) * rank
        cuts = internals.sdy.TensorShardingAttr(sharding).dimension_shardings
        axes = (internals.sdy.DimensionShardingAttr(cut).axes for cut in cuts)
        return tuple(
            tuple(self._axis(internals.sdy.AxisRefAttr(one)) for one in cut) for cut in axes
        )

    def _axis(self, axis: Any) -> tuple[str, int]:
        part = axis.sub_axis_info
        if part is None:
            return axis.name, self._mesh.shape[axis.name]
        part = internals.sdy.SubAxisInfoAttr(part)
        return f"{axis.name}:{part.pre_size}:{part.size}", part.size


def propagated(
    fun: Callable, avals: Iterable[Any], given: Sequence[Any], mesh: Any
) -> Propagated | None:
    """A function of arrays with the shardings that are ``given`` (None: not known), lowered for the
    first platform that has all of its operations; None: there is none."""
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
            with internals.mlir.ir.Location.unknown():
                _reshape_before_broadcasts(module)
            for passes in _PASSES:
                internals.PassManager.parse(passes).run(module)
        return Propagated(module, mesh)
    return None


def _reshape_before_broadcasts(operation: Any) -> None:
    """Axes of one element come and go by a reshape, and are not broadcast, as in XLA's own form of
    a program: Shardy looks through a reshape sooner. Without it layers whose parameters are spread
    like a vector that scales their input were taken for spread over features, and XLA spreads them
    over examples (benchmarks/scale/llama.py)."""
    for region in operation.regions:
        for block in region.blocks:
            for one in list(block.operations):
                _reshape_before_broadcasts(one)
                if one.operation.name == "stablehlo.broadcast_in_dim":
                    _reshape_before_broadcast(one)


def _reshape_before_broadcast(broadcast: Any) -> None:
    ir, hlo = internals.mlir.ir, internals.hlo
    (operand,), (result,) = broadcast.operands, broadcast.results
    shape, wanted = list(operand.type.shape), list(result.type.shape)
    if not operand.type.has_static_shape or not result.type.has_static_shape:
        return
    axes = [int(axis) for axis in broadcast.attributes["broadcast_dimensions"]]
    kept = [at for at, axis in enumerate(axes) if shape[at] == wanted[axis]]
    with ir.InsertionPoint(broadcast.operation):
        if math.prod(shape) == math.prod(wanted):
            same = hlo.ReshapeOp(result.type, operand).result
        elif len(kept) < len(axes):
            few = ir.RankedTensorType.get([shape[at] for at in kept], operand.type.element_type)
            less = hlo.ReshapeOp(few, operand).result
            along = ir.DenseI64ArrayAttr.get([axes[at] for at in kept])
            same = hlo.BroadcastInDimOp(result.type, less, along).result
        else:
            return
    result.replace_all_uses_with(same)
    broadcast.operation.erase()


def _on(mesh: Any, sharding: Any) -> Any:
    """A sharding over a mesh, without the kind of memory; None: it is over another, or none."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return NamedSharding(sharding.mesh, sharding.spec)
    return None


def _main(module) -> Any:
    found = (one for one in module.regions[0].blocks[0].operations if "sym_name" in one.attributes)
    return next(one for one in found if one.attributes["sym_name"].value == "main")


def _of_each(attributes) -> list[Any]:
    """What the attributes of arguments or results say of shardings; None: nothing."""
    name = _SHARDING
    return [one[name] if name in one else None for one in attributes]  # noqa: SIM401 (no dict)


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


def _next(value: Any, numbers: dict[Any, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The results that are made of a value of the module with none of them between."""
    found: list[tuple[int, ...]] = []
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        if one in numbers:
            found.append(numbers[one])
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
