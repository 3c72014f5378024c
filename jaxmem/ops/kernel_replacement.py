"""What `swap` puts in the place of plain attention where the device has a kernel for it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.ops.attention_replacement import AttentionReplacement
from jaxmem.ops.causal_mask import ScoreForm, score_form_of
from jaxmem.ops.patterns import Match, UseGraph

# Queries [batch, length, heads, width], keys and values [batch, length, key heads, width], scale,
# whether a query sees keys up to its own place alone -> like queries.
Kernel = Callable[[jax.Array, jax.Array, jax.Array, float, bool], jax.Array]


# The root of a width, say, which is computed where the function is.
_OF_NUMBERS = ("convert_element_type", "div", "integer_pow", "mul", "neg", "pow", "rsqrt", "sqrt")


class KernelReplacement(AttentionReplacement):
    """An attention of 16-bit values whose scores are scaled, and of which a causal mask may leave
    some out: what such a kernel takes."""

    kernel: Kernel
    form: ScoreForm

    @classmethod
    def with_kernel(
        cls, graph: UseGraph, match: Match, kernel: Kernel, name: str
    ) -> "KernelReplacement | None":
        """None: the kernel does not take it."""
        found = cls.of(graph, match)
        form = score_form_of(found) if found else None
        if not isinstance(found, KernelReplacement) or form is None:
            return None
        sides = (found.query, found.key, found.value)
        dtypes = {graph.flat.aval(side.value).dtype for side in sides}
        lengths = found.shape[found.row], found.shape[found.match.column]
        if len(dtypes) > 1 or dtypes.pop().itemsize != 2:
            return None
        if form.is_causal and lengths[0] != lengths[1]:
            return None
        found.kernel, found.form, found.name = kernel, form, f"attention by {name}"
        given = [graph.flat.aval(value) for value in found.reads]
        try:
            jax.eval_shape(found._derived, *given)
        except (JaxmemError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return None  # widths, lengths or a device that it, or its derivative, is not for
        return found

    def _derived(self, *values: jax.Array) -> Any:
        """What it makes, and gradients: a kernel may take in one pass what it does not in both."""

        def results(*values):
            return self.results(dict(zip(self.reads, values, strict=True)))

        found, pull = jax.vjp(results, *values)
        return found, pull(found)

    def _is_computed(self, step: jaxprs.FlatStep, axes: set) -> bool:
        """Whatever tells which scores a mask leaves out is looked into; none of it is read."""
        return True

    def _node(self, value: Any, frame: tuple) -> tuple:
        graph = self.graph
        step = graph.made_by(value, "reshape", *_OF_NUMBERS)
        shape = graph.flat.avals[value].shape if step else ()
        if step is None or value in self.match.kinds or (shape and step.primitive != "reshape"):
            return super()._node(value, frame)
        if step.primitive == "reshape":
            inner = step.equation.invars[0].aval.shape
            if [size for size in inner if size > 1] != [size for size in shape if size > 1]:
                return self._leaf(value, frame)
            long = iter(axis for axis, size in zip(frame, shape, strict=False) if size > 1)
            axes = tuple(next(long) if size > 1 else None for size in inner)
            return "full", self._node(step.inputs[0], axes)
        nodes = [self._node(operand, ()) for operand in step.inputs]
        if any(node[0] != "number" for node in nodes):
            return "step", step, nodes
        with jax.ensure_compile_time_eval():
            return "number", jaxprs.apply(step, *[node[1] for node in nodes])

    def _attended(self, query, key, value, leaves) -> jax.Array:
        batch, length, groups, lanes, width = query.shape
        query = query.reshape(batch, length, groups * lanes, width)
        out = self.kernel(query, key, value, *self.form)
        return jnp.reshape(out, (batch, length, groups, lanes, value.shape[-1]))


def calling(implementation: Any, mesh: Any = None, rows: tuple[str, ...] = ()) -> Kernel:
    """`jax.nn.dot_product_attention` by an implementation of the device's. With a mesh each device
    attends in its own part of the batch, which is spread over the axes ``rows``: XLA could cut such
    a call over devices with those at hand alone."""

    def kernel(query, key, value, scale, is_causal):
        call = functools.partial(
            jax.nn.dot_product_attention,
            scale=scale,
            is_causal=is_causal,
            implementation=implementation,
        )
        if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
            return call(query, key, value)
        spec = jax.sharding.PartitionSpec(rows)
        specs = {"in_specs": (spec,) * 3, "out_specs": spec}
        return jax.shard_map(call, mesh=mesh, **specs, check_vma=False)(query, key, value)

    return kernel
