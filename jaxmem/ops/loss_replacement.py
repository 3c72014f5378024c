"""What `swap` puts in the place of a plain cross-entropy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.ops.losses import statistics
from jaxmem.ops.patterns import Match, UseGraph


class LossReplacement:
    """The logarithm of the sum, and one logit a row, of the logits of a matmul."""

    name = "softmax_cross_entropy"

    def __init__(
        self, graph: UseGraph, match: Match, operands, axis: int, bias, cap, labels, beyond
    ):
        self.graph, self.match, self.operands = graph, match, operands
        self.axis, self.bias, self.cap, self.labels = axis, bias, cap, labels
        self.beyond = beyond
        self.reads = [value for value in (*operands, bias, labels) if isinstance(value, int)]

    @classmethod
    def of(cls, graph: UseGraph, match: Match) -> "LossReplacement | None":
        step = graph.flat.steps[match.root]
        (left, right), batch = step.equation.params["dimension_numbers"]
        avals = [variable.aval for variable in step.equation.invars]
        last = avals[0].ndim - 1
        if batch != ((), ()) or tuple(left) != (last,) or avals[1].ndim != 2:
            return None
        if "attended" in match.results.values() or match.column != last:
            return None
        found = _bias_and_cap(graph, match)
        if found is None:
            return None
        labels = {cls._labels(graph, match, at) for at in match.results} - {None}
        chosen = [at for at, kind in match.results.items() if kind != "log total"]
        beyond = {
            str(one): one for one in (_out_of_range_value(graph.flat.steps[at]) for at in chosen)
        }
        if len(labels) > 1 or len(beyond) > 1:
            return None
        operands, axis = list(step.inputs), 1 - next(iter(right))
        turned = graph.made_by(operands[1], "transpose")
        if turned is not None:  # an embedding: as it lies
            operands[1], axis = turned.inputs[0], 1 - axis
        label, other = next(iter(labels), None), next(iter(beyond.values()), None)
        return cls(graph, match, operands, axis, *found, label, other)

    @staticmethod
    def _labels(graph: UseGraph, match: Match, at: int) -> int | None:
        step = graph.flat.steps[at]
        if step.primitive == "gather":
            return step.inputs[1]
        if step.primitive != "reduce_sum":
            return None
        product = graph.made_by(step.inputs[0], "mul")
        return None if product is None else graph.one_hot(product, match.kinds)

    def results(self, values: dict[int, Any]) -> dict[int, Any]:
        flat = self.graph.flat
        hidden, weights = (jaxprs.read(values, operand) for operand in self.operands)
        hidden = hidden if self.match.rows is None else hidden[self.match.rows]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        columns = weights.shape[self.axis]
        labels = jnp.zeros(len(hidden), np.int32)
        if self.labels is not None:
            labels = values[self.labels].reshape(-1)
        if self.beyond is None:
            labels = jnp.clip(labels, 0, columns - 1)
        known = (labels >= 0) & (labels < columns)
        bias = None if self.bias is None else values[self.bias].reshape(-1)
        found = statistics(hidden, weights, bias, jnp.where(known, labels, 0), self.axis, self.cap)
        log = jnp.log(found.total)
        made = {}
        for at, kind in self.match.results.items():
            step = flat.steps[at]
            if kind == "log total":
                value = found.largest + log
            elif kind == "chosen":
                value = found.chosen
            else:
                value = (found.chosen - found.largest) - log
            if kind != "log total" and self.beyond is not None:
                value = jnp.where(known, value, self.beyond)
            aval = step.equation.outvars[0].aval
            made[step.outputs[0]] = value.reshape(aval.shape).astype(aval.dtype)
        return made


def _out_of_range_value(step: jaxprs.FlatStep) -> float | None:
    """What is chosen for a label out of range: zero by a one-hot matrix, by a gather a number of
    its own; None: what the nearest label chooses."""
    if step.primitive != "gather":
        return 0.0
    if step.equation.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return None
    number = step.equation.params["fill_value"]
    return np.nan if number is None else float(number)


def _bias_and_cap(graph: UseGraph, match: Match) -> tuple[int | None, float | None] | None:
    """What the logits go through: a bias, then ``cap * tanh(logits / cap)``, each None where there
    is none; None: something else."""
    step = graph.flat.steps[match.root]
    shape, current = step.equation.outvars[0].aval.shape, step.outputs[0]
    bias: int | None = None
    cap: float | None = None
    scale = 1.0  # of the logits; behind a cap, of the cap
    for at in match.chain:
        link = graph.flat.steps[at]
        of = [graph.unsliced(value) for value in link.inputs]
        if current not in of or link.primitive == "transpose":
            return None
        others = [v for v, one in zip(link.inputs, of, strict=True) if one != current]
        other = others[0] if others else None
        current = link.outputs[0]
        if link.primitive == "convert_element_type":
            if not jnp.issubdtype(link.equation.params["new_dtype"], jnp.floating):
                return None
            continue
        number = _number(graph, other)
        if link.primitive == "add" and bias is None and scale == 1 and cap is None:
            bias, fits = graph.unbroadcast(other, shape, last=True)
            if not fits or not isinstance(bias, int) or not _is_row(graph, bias, shape[-1]):
                return None
        elif link.primitive == "tanh" and cap is None and scale != 0:
            cap = 1 / scale
        elif link.primitive == "mul" and number is not None:
            scale *= number
        elif link.primitive == "div" and number and link.inputs[0] != other:
            scale /= number
        else:
            return None
    # What divides the logits and multiplies them again are two constants of the program, rounded.
    is_one = scale == 1 if cap is None else abs(scale - 1) <= 1e-6
    return (bias, cap) if is_one else None


def _number(graph: UseGraph, value: Any) -> float | None:
    """A constant, if the value is one number."""
    if isinstance(value, int) or value is None:
        made = graph.made_by(value, "broadcast_in_dim", "convert_element_type")
        return None if made is None else _number(graph, made.inputs[0])
    return float(value.val) if np.ndim(value.val) == 0 else None


def _is_row(graph: UseGraph, value: int, size: int) -> bool:
    aval = graph.flat.avals[value]
    return aval.size == size and aval.shape[-1:] == (size,)
