"""Parameters that are spread over devices, gathered where a function reads them (ZeRO-3, FSDP).

Without it XLA may leave a layer's weights where they are and send the activations of all devices
instead: it knows nothing of how often either is used.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from jaxmem import jaxprs

# A value is made of spread parameters alone, of constants alone, or of anything else. Of a spread
# parameter, or a cast of one, a `PartitionSpec` is in the place of SPREAD.
SPREAD, CONSTANT, OTHER = range(3)
Kind: TypeAlias = "int | PartitionSpec"


def gathered_where_read(
    fun: Callable, specs: Sequence[PartitionSpec | None], gather: Callable
) -> Callable:
    """``fun(params, *args)``, in which what is made of spread parameters alone (a leaf each has a
    spec; None: it is whole) is passed through ``gather(value, spec)`` where it meets anything else;
    the spec is None where it is not known.

    So a weight is cast before it is gathered. A scan slices it first: each iteration gathers its
    own, and does it again in the backward pass, as a region of the function's own does. Elsewhere
    what is gathered is kept, unless a plan or a region has it gathered again.
    """

    @functools.wraps(fun)
    def gathered(params, *args):
        leaves, tree = jax.tree.flatten(params)
        flat = jaxprs.flatten(lambda *leaves: fun(jax.tree.unflatten(tree, leaves), *args), leaves)
        arrays = flat.arrays_closed_over
        kinds: list[Kind] = [CONSTANT if at in arrays else OTHER for at in range(len(flat.consts))]
        kinds += [OTHER if spec is None else spec for spec in specs]
        results = _Gathering(gather).run(flat, kinds, [*flat.consts, *leaves])
        return jax.tree.unflatten(flat.out_tree, results)

    return gathered


@dataclasses.dataclass(frozen=True)
class _Gathering:
    """``slices``: whether it is inside of a scan. XLA gathers along the outermost axis, and for it
    laid out whole stacks anew of which a scan reads slices: a slice lies row by row first."""

    gather: Callable
    slices: bool = False

    def run(
        self, flat: jaxprs.FlatJaxpr, kinds: Sequence[Kind], inputs: Sequence[Any]
    ) -> list[Any]:
        """The results of a flat jaxpr on inputs of these kinds."""
        found, values = kinds_of(flat, kinds), dict(enumerate(inputs))
        for step in flat.steps:
            of = [_kind(found, operand) for operand in step.inputs]
            operands = [jaxprs.read(values, operand) for operand in step.inputs]
            values.update(zip(step.outputs, self._results(step, of, operands), strict=True))
        return [jaxprs.read(values, output) for output in flat.outputs]

    def _results(self, step: jaxprs.FlatStep, of: list[Kind], operands: list[Any]) -> list[Any]:
        if not meets(step, of):
            return jaxprs.evaluate(step, operands)
        if step.primitive == "scan":
            return self._scan(step, of, operands)
        if jaxprs.is_region(step.equation):
            flat = jaxprs.called_jaxpr(step.equation)
            kinds = [CONSTANT] * len(flat.consts) + of

            def region(*operands):
                # XLA would merge what is gathered here with what is gathered again.
                operands = jax.lax.optimization_barrier(operands)
                return self.run(flat, kinds, [*flat.consts, *operands])

            return jaxprs.checkpoint_like(step, region, operands)
        return jaxprs.evaluate(step, self._gathered(of, operands))

    def _scan(self, step: jaxprs.FlatStep, of: list[Kind], operands: list[Any]) -> list[Any]:
        """Slices are gathered in the body, constants and the first carry before it."""
        loop = jaxprs.loop_of(step.equation)
        first, carry = loop.carry.stop, loop.carry
        operands = [*self._gathered(of[:first], operands[:first]), *operands[first:]]
        constants, slices = operands[loop.body_consts], operands[first:]
        kinds = [
            *[CONSTANT] * len(loop.body.consts),
            *[CONSTANT if kind == CONSTANT else OTHER for kind in of[loop.body_consts]],
            *[OTHER] * (carry.stop - carry.start),
            *map(_of_slices, of[first:]),
        ]

        inside = dataclasses.replace(self, slices=True)

        def body(carry, slices):
            given = [*loop.body.consts, *constants, *carry, *slices]
            results = inside.run(loop.body, kinds, given)
            return results[: len(carry)], results[len(carry) :]

        found = kinds_of(loop.body, kinds)
        if any(
            meets(one, [_kind(found, operand) for operand in one.inputs])
            and not jaxprs.is_region(one.equation)
            for one in loop.body.steps
        ):
            policy = jaxprs.OperationPolicy(_saves_all_but_what_is_gathered)
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        with jaxprs.context(step):
            last, stacked = jax.lax.scan(body, operands[carry], slices, **loop.options)
        return [*last, *stacked]

    def _gathered(self, of: Sequence[Kind], operands: Sequence[Any]) -> list[Any]:
        return [
            self._whole(x, kind) if _is_spread(kind) and x.ndim else x
            for kind, x in zip(of, operands, strict=True)
        ]

    def _whole(self, x: Any, kind: Kind) -> Any:
        x = jaxprs.row_major(x) if self.slices else x
        return self.gather(x, None if kind == SPREAD else kind)


def kinds_of(flat: jaxprs.FlatJaxpr, kinds: Sequence[Kind]) -> dict[int, Kind]:
    """The kind of each value, from those of the inputs."""
    found = dict(enumerate(kinds))
    for step in flat.steps:
        of = [_kind(found, operand) for operand in step.inputs]
        if step.primitive == "optimization_barrier":
            found.update(zip(step.outputs, of, strict=True))
            continue
        placed = step.primitive == "sharding_constraint"  # the function's own
        alone = not placed and OTHER not in of and not jaxprs.side_effects(step)
        kind: Kind = (SPREAD if any(map(_is_spread, of)) else CONSTANT) if alone else OTHER
        if alone and step.primitive == "convert_element_type":
            (kind,) = of
        found.update(dict.fromkeys(step.outputs, kind))
    return found


def meets(step: jaxprs.FlatStep, of: Sequence[Kind]) -> bool:
    """Whether a step reads spread parameters together with anything else."""
    apart = step.primitive in ("optimization_barrier", "sharding_constraint", "shard_map")
    return any(map(_is_spread, of)) and OTHER in of and not apart


def _is_spread(kind: Kind) -> bool:
    return kind == SPREAD or isinstance(kind, PartitionSpec)


def _of_slices(kind: Kind) -> Kind:
    """The kind of a scan's slices, by that of what it slices."""
    if not isinstance(kind, PartitionSpec):
        return kind
    return SPREAD if kind[0] is not None else PartitionSpec(*kind[1:])


def _kind(found: dict[int, Kind], operand: Any) -> Kind:
    return found[operand] if isinstance(operand, int) else CONSTANT


def _saves_all_but_what_is_gathered(primitive, *_, **__) -> bool:
    return primitive.name not in ("sharding_constraint", "row_major")
