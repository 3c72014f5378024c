"""Attention and cross-entropy as they stand in a flat jaxpr.

From a matmul on, every value that depends on it is given a kind, by the operation that makes it and
the kinds of what that reads: scores or logits, their maximum, what is left of them without it, its
exponential, sums of those. Where each of these is read only by operations that make another kind,
or one of the results of `jaxmem.ops`, all of it can be left out.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxmem import jaxprs

# Each element by itself.
ELEMENTWISE = frozenset(
    "abs add and clamp convert_element_type div eq exp ge gt integer_pow le log1p logistic lt max "
    "min mul ne neg not or select_n sign square stop_gradient sub tanh".split()
)
# Of one number a row: where it is, not what.
_SAME = frozenset(
    "broadcast_in_dim convert_element_type reshape squeeze stop_gradient transpose".split()
)

_OF_ROWS = ("slice", "reshape")  # of scores: some rows, or all of them with other axes


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a value is, and which axis of the matmul's result each of its axes is; None: one that
    is 1.

    Attributes:
        rows: from where to where it has those of the matmul's result, along each axis; None: all.
        moved: whether its rows are not those of the matmul's result, as they lie there. If they are
            reshaped, each of its axes but the last has a number below 0.
    """

    name: str
    axes: tuple[int | None, ...]
    rows: tuple[slice, ...] | None = None
    moved: bool = False


@dataclasses.dataclass
class Match:
    """A matmul whose result need not be. ``chain`` are the steps from it to the matrix that the
    softmax is of, ``inside`` the numbers of all steps that are left out, and ``results`` what
    they are left out for: the number of a step, and what its result is. ``matrix`` is what the
    softmax is of, and ``column`` the axis of the matmul's result that it is over. ``rows`` and
    ``moved`` are of the results, as of a `Kind`."""

    root: int
    chain: list[int]
    kinds: dict[int, Kind]
    inside: set[int]
    results: dict[int, str]
    matrix: int = -1
    column: int | None = None
    rows: tuple[slice, ...] | None = None
    moved: bool = False


class UseGraph:
    """Who makes and who reads each value of a flat jaxpr."""

    def __init__(self, flat: jaxprs.FlatJaxpr):
        self.flat = flat
        self.maker = {value: at for at, step in enumerate(flat.steps) for value in step.outputs}
        self.readers: dict[int, list[int]] = {}
        for at, step in enumerate(flat.steps):
            for value in set(step.uses):
                self.readers.setdefault(value, []).append(at)
        self.outputs = {value for value in flat.outputs if isinstance(value, int)}

    def made_by(self, value: Any, *primitives: str) -> jaxprs.FlatStep | None:
        """The step that makes a value, if it is one of these."""
        at = self.maker.get(value) if isinstance(value, int) else None
        step = None if at is None else self.flat.steps[at]
        return step if step and step.primitive in primitives else None

    def match(self, root: int) -> Match | None:
        """What can be left out from a matmul on; None: something else reads what depends on it."""
        result = self.flat.steps[root].outputs[0]
        axes = tuple(range(len(self.flat.avals[result].shape)))
        kinds = {result: Kind("scores", axes)}
        found = Match(root, [], kinds, {root}, {})
        pending = set(self.readers.get(result, ()))
        if result in self.outputs:
            return None
        while pending:
            at = min(pending)
            pending.remove(at)
            step = self.flat.steps[at]
            if all(
                output not in self.readers and output not in self.outputs for output in step.outputs
            ):
                found.inside.add(at)  # nobody reads it
                continue
            kind = self._kind(step, kinds)
            if kind is None:
                return None
            found.inside.add(at)
            (output,) = step.outputs
            takes_rows = kind.name == "scores" and step.primitive in _OF_ROWS
            if not takes_rows:
                of, *others = (kinds[value] for value in step.uses if value in kinds)
                if any((one.rows, one.moved) != (of.rows, of.moved) for one in others):
                    return None
                kind = dataclasses.replace(kind, rows=of.rows, moved=of.moved)
            if kind.name in ("attended", "chosen", "chosen share", "log total"):
                if found.results and kind.rows != found.rows:
                    return None
                found.results[at] = kind.name
                found.rows, found.moved = kind.rows, found.moved or kind.moved
                continue
            if kind.name == "scores" and not takes_rows:
                found.chain.append(at)
            if step.primitive == "reduce_max":
                found.matrix = step.inputs[0]
                found.column = kinds[found.matrix].axes[-1]
            kinds[output] = kind
            if output in self.outputs:
                return None
            pending |= set(self.readers[output])
        return found if found.results else None

    def _kind(self, step: jaxprs.FlatStep, kinds: dict[int, Kind]) -> Kind | None:
        """The kind of what a step makes of values that have one; None: it is no part of this."""
        name = step.primitive
        read = [kinds.get(value) if isinstance(value, int) else None for value in step.inputs]
        names = [kind.name if kind else None for kind in read]
        first = next(kind for kind in read if kind)
        own = {kind.name for kind in read if kind}
        shape = step.equation.outvars[0].aval.shape if step.equation.outvars else ()
        # A number for each row stands where its row is, or the whole is no softmax.
        same = all(
            kind is None
            or len(kind.axes) != len(shape)
            or all(one in (None, other) for one, other in zip(kind.axes, first.axes, strict=False))
            for kind in read
        )
        if own == {"scores"} and name in _OF_ROWS:
            return self._slice_rows(step, first)
        if name == "transpose" or (own <= {"largest", "total", "log"} and name in _SAME):
            return self._permuted(step, first)
        if own == {"scores"} and name in ELEMENTWISE and same and len(shape) == len(first.axes):
            return first
        if name == "convert_element_type" and first.name in (
            "shifted",
            "exp",
            "share",
            "log share",
        ):
            return first
        if own == {"scores"} and name == "reduce_max" and self._is_last_axis(step, first):
            return Kind("largest", first.axes[:-1])
        if own == {"largest"} and name in ("max", "is_finite", "select_n"):
            return first
        if name == "sub" and names == ["scores", "largest"] and same:
            return Kind("shifted", first.axes)
        if own == {"shifted"} and name == "exp":
            return Kind("exp", first.axes)
        if own == {"exp"} and name == "reduce_sum" and self._is_last_axis(step, first):
            return Kind("total", first.axes[:-1])
        if own == {"total"} and name == "abs":
            return first
        if own == {"total"} and name == "log":
            return Kind("log", first.axes)
        if name == "add" and sorted(names, key=str) == ["largest", "log"]:
            return Kind("log total", first.axes)
        if name == "div" and names == ["exp", "total"] and same:
            return Kind("share", first.axes)
        if name == "sub" and names == ["shifted", "log"] and same:
            return Kind("log share", first.axes)
        if own in ({"scores"}, {"log share"}):
            suffix = " share" if own == {"log share"} else ""
            last = len(first.axes) - 1
            if name == "gather" and names[0] and jaxprs.picked_axis(step.equation) == last:
                return Kind("chosen" + suffix, first.axes)
            if name == "mul" and self.one_hot(step, kinds) is not None:
                return Kind("masked" + suffix, first.axes)
        if (
            name == "reduce_sum"
            and own <= {"masked", "masked share"}
            and self._is_last_axis(step, first)
        ):
            return Kind("chosen" + first.name.removeprefix("masked"), first.axes)
        if own == {"share"} and name == "dot_general":
            return Kind("attended", first.axes)
        return None

    def unsliced(self, value: Any) -> Any:
        """What a value has rows of."""
        while (step := self.made_by(value, *_OF_ROWS)) is not None:
            value = step.inputs[0]
        return value

    def _slice_rows(self, step: jaxprs.FlatStep, kind: Kind) -> Kind | None:
        """Some rows of scores, whole ones, or all of them with other axes, in the same order."""
        params, before = step.equation.params, step.equation.invars[0].aval.shape
        after = step.equation.outvars[0].aval.shape
        if not after or after[-1] != before[-1] or kind.axes[-1] is None:
            return None
        if step.primitive == "reshape":
            axes = tuple(-1 - at for at in range(len(after) - 1))
            in_order = params["dimensions"] is None
            kept = Kind(kind.name, (*axes, kind.axes[-1]), kind.rows, moved=True)
            return kept if in_order else None
        if (
            kind.moved
            or kind.axes != tuple(range(len(before)))
            or set(params["strides"] or ()) - {1}
        ):
            return None
        bounds = zip(params["start_indices"][:-1], params["limit_indices"][:-1], strict=True)
        return Kind(kind.name, kind.axes, tuple(slice(*pair) for pair in bounds), moved=True)

    def _permuted(self, step: jaxprs.FlatStep, kind: Kind) -> Kind | None:
        """A value of this kind with its axes elsewhere."""
        params, before = step.equation.params, step.equation.invars[0].aval.shape
        after = step.equation.outvars[0].aval.shape
        axes = kind.axes
        if step.primitive == "transpose":
            axes = tuple(axes[axis] for axis in params["permutation"])
        elif step.primitive == "broadcast_in_dim":
            at = dict(zip(map(int, params["broadcast_dimensions"]), axes, strict=True))
            axes = tuple(at.get(axis) for axis in range(len(after)))
        elif step.primitive in ("reshape", "squeeze"):
            if [size for size in before if size > 1] != [size for size in after if size > 1]:
                return None
            long = iter([axis for axis, size in zip(axes, before, strict=True) if size > 1])
            axes = tuple(next(long) if size > 1 else None for size in after)
        return Kind(kind.name, axes)

    def _is_last_axis(self, step: jaxprs.FlatStep, kind: Kind) -> bool:
        """Whether a reduction is over the last axis."""
        return tuple(step.equation.params["axes"]) == (len(kind.axes) - 1,)

    def one_hot(self, step: jaxprs.FlatStep, kinds: dict[int, Kind]) -> int | None:
        """The labels, if the other operand of a product is a one-hot matrix of them."""
        other = next((v for v in step.inputs if not isinstance(v, int) or v not in kinds), None)
        if (maker := self.made_by(other, "convert_element_type")) is not None:
            other = maker.inputs[0]
        equal = self.made_by(other, "eq")
        if equal is None:
            return None
        shape = step.equation.outvars[0].aval.shape
        for labels, numbers in (equal.inputs, equal.inputs[::-1]):
            numbers, last = self.unbroadcast(numbers, shape, last=True)
            iota = self.made_by(numbers, "iota")
            if iota is None or not last or self.flat.avals[numbers].shape[-1] != shape[-1]:
                continue
            if iota.equation.params["dimension"] != len(self.flat.avals[numbers].shape) - 1:
                continue
            labels, first = self.unbroadcast(labels, shape, last=False)
            rows = int(np.prod(shape[:-1]))
            if isinstance(labels, int) and first and self.flat.avals[labels].size == rows:
                return labels
        return None

    def unbroadcast(self, value: Any, shape: tuple[int, ...], last: bool) -> tuple[Any, bool]:
        """What a value is a broadcast of, and whether its axes are the last ones of a shape, or the
        first ones."""
        fits = True
        while (step := self.made_by(value, "broadcast_in_dim")) is not None:
            axes = tuple(map(int, step.equation.params["broadcast_dimensions"]))
            count = len(step.equation.outvars[0].aval.shape)
            start = count - len(axes) if last else 0
            fits = fits and axes == tuple(range(start, start + len(axes)))
            value = step.inputs[0]
        return value, fits
