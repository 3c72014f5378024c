"""What `swap` puts in the place of plain attention."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ops.flash import attend, widened
from jaxmem.ops.patterns import ELEMENTWISE, Match, UseGraph


class AttentionReplacement:
    """Softmax of a chain of operations on the scores of a matmul, times values.

    Axes are named by the axis of the first matmul's result that they are. Of what is combined
    with the scores, a value with both queries and keys is computed block by block if it is made of
    smaller ones by operations on single elements (a mask from places, say); else it is read.
    """

    name = "attention"

    def __init__(self, graph: UseGraph, match: Match, end: jaxprs.FlatStep):
        self.graph, self.match, self.end = graph, match, end
        root = graph.flat.steps[match.root]
        self.shape = root.equation.outvars[0].aval.shape
        contracted, batches = root.equation.params["dimension_numbers"]
        count = len(batches[0])
        sides, first = [], count
        for value, variable, batch, inner in zip(
            root.inputs, root.equation.invars, batches, contracted, strict=True
        ):
            free = variable.aval.ndim - len(batch) - len(inner)
            sides.append(
                _MatmulOperand(value, variable.aval.ndim, batch, inner, range(first, first + free))
            )
            first += free
        self.key, self.query = sides if match.column in sides[0].free else sides[::-1]
        at = next(i for i, value in enumerate(end.inputs) if value in match.kinds)
        self.share_at, self.share = at, match.kinds[end.inputs[at]].axes
        contracted, batches = end.equation.params["dimension_numbers"]
        self.share_batch = [self.share[axis] for axis in batches[at]]
        self.summed = [self.share[axis] for axis in contracted[at]]
        value = end.equation.invars[1 - at].aval
        inner, batch = contracted[1 - at], batches[1 - at]
        batch = (
            [batch[self.share_batch.index(axis)] for axis in range(count)] if self.fits() else ()
        )
        self.value = _MatmulOperand(end.inputs[1 - at], value.ndim, batch, inner, (-1,))
        self.row = max(self.query.free, key=lambda axis: self.shape[axis], default=-1)
        heads = tuple(axis for axis in self.query.free if axis != self.row)
        batch = tuple(range(count))
        self.groups = batch[:1], batch[1:], heads, (self.row,), (match.column,)
        self.leaves: list[tuple[Any, tuple]] = []
        self.nodes = {
            at: [self._node(value, match.kinds[end_of].axes) for value in step.inputs]
            for at in match.chain
            for step in [graph.flat.steps[at]]
            for end_of in [step.outputs[0]]
        }
        sources = (self.query.value, self.key.value, self.value.value, *(v for v, _ in self.leaves))
        self.reads = [value for value in sources if isinstance(value, int)]

    @classmethod
    def of(cls, graph: UseGraph, match: Match) -> "AttentionReplacement | None":
        if list(match.results.values()) != ["attended"]:
            return None
        found = cls(graph, match, graph.flat.steps[next(iter(match.results))])
        value = found.end.equation.invars[1 - found.share_at].aval
        simple = (
            len(found.key.free) == 1
            and len(found.query.free) >= 1
            and len(found.key.inner) == len(found.query.inner) == 1
            and found.fits()
            and value.ndim == len(found.share_batch) + 2
        )
        return found if simple else None

    def fits(self) -> bool:
        """Whether the second matmul sums over keys, in each batch of the first."""
        count = len(self.query.batch)
        return self.summed == [self.match.column] and sorted(self.share_batch) == list(range(count))

    # ---- what is combined with the scores

    def _node(self, value: Any, frame: tuple) -> tuple:
        """How to compute a block of a value whose axes are ``frame``; None: one that is 1."""
        graph, kinds = self.graph, self.match.kinds
        if not isinstance(value, int):
            return ("number", value.val) if not np.ndim(value.val) else self._leaf(value, frame)
        if value in kinds:
            return "scores", value
        aval = graph.flat.avals[value]
        frame = frame if aval.shape else ()  # a scalar goes with any shape
        whole = {axis for axis, size in zip(frame, aval.shape, strict=True) if size > 1}
        step = graph.made_by(value, "broadcast_in_dim", "transpose", "iota", *ELEMENTWISE)
        if step is None or not self._is_computed(step, whole):
            return self._leaf(value, frame)
        params, operands = step.equation.params, [v.aval for v in step.equation.invars]
        if step.primitive == "iota":
            axis = frame[params["dimension"]]
            if axis not in (self.row, self.match.column):
                return self._leaf(value, frame)
            return "place", aval.dtype, axis == self.row
        if step.primitive == "transpose":
            places = dict(zip(params["permutation"], frame, strict=True))
            return self._node(step.inputs[0], tuple(places[i] for i in range(len(frame))))
        if step.primitive == "broadcast_in_dim":
            axes = (frame[axis] for axis in params["broadcast_dimensions"])
            return "full", self._node(step.inputs[0], tuple(axes))
        nodes = [
            self._node(operand, frame if variable.ndim else ())
            for operand, variable in zip(step.inputs, operands, strict=True)
        ]
        return "step", step, nodes

    def _is_computed(self, step: jaxprs.FlatStep, axes: set) -> bool:
        """Whether what a step makes, which has these axes, is computed block by block."""
        numbers = not any(isinstance(value, int) for value in step.inputs)
        return numbers or {self.row, self.match.column} <= axes

    def _leaf(self, value: Any, frame: tuple) -> tuple:
        if (value, frame) not in self.leaves:
            self.leaves.append((value, frame))
        return "leaf", self.leaves.index((value, frame))

    def _arranged(self, array: Any, frame: tuple) -> jax.Array:
        """A leaf as [batch, groups, heads, queries, keys], each axis whole or 1."""
        array = jnp.asarray(array)
        at = {axis: i for i, axis in enumerate(frame) if array.shape[i] > 1}
        order = [axis for group in self.groups for axis in group]
        present = [at[axis] for axis in order if axis in at]
        array = array.transpose(*present, *(i for i in range(array.ndim) if i not in present))
        array = array.reshape([self.shape[axis] if axis in at else 1 for axis in order])
        sizes, merged = [], []
        for group in self.groups:
            some = any(axis in at for axis in group)
            sizes += [self.shape[axis] if some else 1 for axis in group]
            merged.append(math.prod(self.shape[axis] for axis in group) if some else 1)
        return jnp.broadcast_to(array, sizes).reshape(merged)

    def _modify(self, scores, others, row, column):
        wide = scores.dtype

        def of_node(node):
            kind, *rest = node
            if kind == "scores":
                return known[rest[0]]
            if kind == "number":
                return widened(jnp.asarray(rest[0]), wide)
            if kind == "leaf":
                return widened(others[rest[0]], wide)
            if kind == "place":
                first, axis = (row, 2) if rest[1] else (column, 4)
                return jax.lax.broadcasted_iota(rest[0], scores.shape, axis) + first.astype(rest[0])
            if kind == "full":
                return jnp.broadcast_to(of_node(rest[0]), scores.shape)
            return of_step(*rest)

        def of_step(step, nodes):
            operands = [of_node(node) for node in nodes]
            if step.primitive == "transpose":
                return operands[0]
            dtype = step.equation.outvars[0].aval.dtype
            if step.primitive == "convert_element_type" and jnp.issubdtype(dtype, jnp.floating):
                return operands[0].astype(wide)
            return jaxprs.apply(step, *operands)

        root = self.graph.flat.steps[self.match.root]
        known = {root.outputs[0]: scores}
        for at in self.match.chain:
            step = self.graph.flat.steps[at]
            known[step.outputs[0]] = of_step(step, self.nodes[at])
        return known[self.match.matrix].astype(wide)

    # ---- the operation

    def results(self, values: dict[int, Any]) -> dict[int, Any]:
        query, key, value = (
            jnp.asarray(jaxprs.read(values, side.value))
            for side in (self.query, self.key, self.value)
        )
        dtype = jnp.result_type(query, key, value)
        first, others, heads, _, _ = self.groups
        batch, groups, lanes, length, keys = (
            math.prod(self.shape[axis] for axis in group) for group in self.groups
        )
        query = self.query.aligned(query, [*first, self.row, *others, *heads])
        query = query.reshape(batch, length, groups, lanes, -1).astype(dtype)
        key, value = (
            side.aligned(array, [*first, own, *others], last).reshape(batch, keys, groups, -1)
            for side, array, own, last in (
                (self.key, key, self.match.column, None),
                (self.value, value, None, -1),
            )
        )
        leaves = tuple(
            self._arranged(jaxprs.read(values, leaf), frame) for leaf, frame in self.leaves
        )
        out = self._attended(query, key.astype(dtype), value.astype(dtype), leaves)
        named = [*first, self.row, *others, *heads, -1]
        out = out.reshape([*(self.shape[axis] for axis in named[:-1]), out.shape[-1]])
        free = [axis for axis in self.share if axis not in (*self.share_batch, *self.summed)]
        wanted = [*self.share_batch, *([*free, -1] if self.share_at == 0 else [-1, *free])]
        aval = self.end.equation.outvars[0].aval
        out = out.transpose([named.index(axis) for axis in wanted]).astype(aval.dtype)
        return {self.end.outputs[0]: out}

    def _attended(self, query, key, value, leaves) -> jax.Array:
        """``[batch, queries, groups, heads, value width]``, of queries like it and of keys and
        values ``[batch, keys, groups, width]``."""
        return attend(query, key, value, leaves, self._modify, False)


class _MatmulOperand:
    """An operand of a matmul; ``free`` names those of its axes that are neither summed nor in
    the batch."""

    def __init__(self, value: Any, ndim: int, batch, inner, free):
        self.value, self.batch, self.inner, self.free = value, tuple(batch), tuple(inner), free
        rest = [i for i in range(ndim) if i not in (*self.batch, *self.inner)]
        self.at = dict(zip(range(len(self.batch)), self.batch, strict=True))
        self.at |= dict(zip(free, rest, strict=False))

    def aligned(self, array: jax.Array, order: list, last: Any = None) -> jax.Array:
        """The array with its axes in order, the summed one where None stands and at the end, or
        another one at the end."""
        axes = [self.inner[0] if axis is None else self.at[axis] for axis in order]
        axes.append(self.inner[0] if last is None else self.at[last])
        return array.transpose(axes)
