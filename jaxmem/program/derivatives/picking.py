"""One element of each row, whose derivative writes nothing but the cotangent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ground.widths import promote_at_least
from jaxmem.program.derivatives.derivative import Derivative


class Picking(Derivative):
    """Gathers of one element of each row: a fused reduction."""

    def cost(self, equation) -> int | None:
        """Nothing, where it takes one element of each of some rows."""
        gathers = jaxprs.operation_of(equation) == "gather"
        return 0 if gathers and jaxprs.picked_axis(equation) is not None else None

    def matches(self, step, kernel) -> bool:
        """Whether it is one, of a kernel that is fused."""
        return kernel.fused and self.cost(step.equation) == 0

    def emit(self, step, operands, alone) -> jax.Array:
        """The elements."""
        return pick(step, *operands)


def pick(step: jaxprs.FlatStep, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """What a gather takes: one element of each row, as a loss takes the logits of the labels.

    XLA's derivative scatters the cotangent into an array of zeros, one as large as the operand, in
    float32, and copies that. Here each element asks whether it is the one: XLA fuses that into the
    kernel that writes the cotangent. A region of its own, so that nothing but the indices is kept.
    """
    return jax.checkpoint(functools.partial(_picked, step))(operand, indices)


def _picked(step: jaxprs.FlatStep, operand: jax.Array, indices: jax.Array) -> jax.Array:
    @jax.custom_jvp
    def picked(operand, indices):
        return jaxprs.apply(step, operand, indices)

    @picked.defjvp
    def _(primals, tangents):
        out = picked(*primals)
        operand, indices = primals
        axis = jaxprs.picked_axis(step.equation)
        assert axis is not None
        # Wide enough for the numbers of all elements.
        indices = indices.astype(promote_at_least(np.int32, indices.dtype))
        if step.equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, operand.shape[axis] - 1)
        numbers = jax.lax.broadcasted_iota(indices.dtype, operand.shape, axis)
        rows = (*operand.shape[:axis], 1, *operand.shape[axis + 1 :])
        is_picked = numbers == indices.reshape(rows)
        return out, jnp.sum(tangents[0], axis, where=is_picked).reshape(out.shape)

    return picked(operand, indices)
