"""Stretches of a flat program under `jax.checkpoint`, as their author would write it."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.planning import Segment


def run_segments(flat: jaxprs.FlatJaxpr, segments: Sequence[Segment], leaves: Sequence[Any]) -> Any:
    """The results of a traced function on ``leaves``, with its segments under `jax.checkpoint`."""
    values: dict[int, Any] = dict(enumerate([*flat.consts, *leaves]))
    last_used = {value: at for at, step in enumerate(flat.steps) for value in step.uses}
    last_used |= dict.fromkeys(flat.observed, len(flat.steps))
    done = 0
    for segment in segments:
        flat.run(flat.steps[done : segment.start], values)
        steps = flat.steps[segment.start : segment.stop]
        made = [value for step in steps for value in step.outputs]
        kept = [value for value in made if last_used.get(value, -1) >= segment.stop]
        reads = sorted({value for step in steps for value in step.uses}.difference(made))

        def run(*operands, steps=steps, reads=reads, kept=kept):
            inner = dict(zip(reads, operands, strict=True))
            flat.run(steps, inner)
            return [inner[value] for value in kept]

        checkpointed = jax.checkpoint(run, policy=_POLICIES[segment.policy])
        results = checkpointed(*(values[value] for value in reads))
        values.update(zip(kept, results, strict=True))
        done = segment.stop
    flat.run([*flat.steps[done:], *flat.prints], values)
    outputs = [jaxprs.as_array(jaxprs.read(values, output)) for output in flat.outputs]
    return jax.tree.unflatten(flat.out_tree, outputs)


def _is_matmul(primitive, *_, **__) -> bool:
    return primitive in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)


def _is_matmul_without_batch(primitive, *_, dimension_numbers=None, **__) -> bool:
    if primitive is not jax.lax.dot_general_p:
        return _is_matmul(primitive)
    _, (batch, _) = dimension_numbers
    return not batch


_POLICIES = {
    "nothing_saveable": None,
    "dots_with_no_batch_dims_saveable": jaxprs.OperationPolicy(_is_matmul_without_batch),
    "dots_saveable": jaxprs.OperationPolicy(_is_matmul),
}
