"""An optimizer update on arrays in host memory, fetched and returned piece by piece.

XLA's scheduler alone would start every transfer at once, since nothing tells it not to.
"""

import contextvars
import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemWarning, OffloadError
from jaxmem.program.slicing import Slicing, find, pieces, put, take

# Bytes of state of one parameter, four at least a value, that are on the device at once: one such
# chunk comes while another goes.
CHUNK = 64 * 2**20


def offloadable(leaf: Any) -> bool:
    """Whether a leaf goes to host memory: scalars and empty arrays stay on the device."""
    return getattr(leaf, "ndim", 0) > 0 and leaf.size > 0


def to_host(leaf: Any) -> Any:
    """The leaf in host memory, if it is one to go there."""
    if not offloadable(leaf):
        return leaf
    kinds = jaxprs.memory_kinds()
    if "pinned_host" not in kinds:
        raise OffloadError(
            f"Arrays are to be kept in pinned host memory, and the devices of this platform "
            f"({jax.default_backend()}) have {' and '.join(kinds) or 'no memory kinds'}. "
            "Keep them on the device: leave jaxmem.offload and jaxmem.layers out."
        )
    return jax.device_put(leaf, jaxprs.HOST)


def to_device(leaf: Any) -> Any:
    """The leaf in device memory."""
    return jax.device_put(leaf, jaxprs.DEVICE) if _on_host(leaf) else leaf


def fetch(stack: Any, index: Any, after: Sequence[Any] = ()) -> Any:
    """One layer of a stack, on the device; not before ``after`` is there."""
    if jaxprs.memory_space(stack) is jaxprs.HOST and after:
        stack, *_ = jax.lax.optimization_barrier((stack, *after))
    taken = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return to_device(taken)


def store(stack: Any, value: Any, index: Any) -> Any:
    """The stack with one layer replaced, in place where the compiler owns the stack."""
    value = jnp.asarray(value, stack.dtype)[None]
    if _on_host(stack):
        value = jax.device_put(value, jaxprs.HOST)
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, 0)


_nested = contextvars.ContextVar("jaxmem_nested", default=False)


def nested() -> bool:
    """Whether this is traced as part of an update that is streamed already."""
    return _nested.get()


def stream(
    update: Callable,
    gradients: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
    *,
    index: Any = None,
    on_host: bool = True,
) -> tuple[Any, Any]:
    """``update(gradients, state, params, **extra)`` with what is on the host kept there.

    The results are computed one after another, each with the operations that it alone still
    needs. A host leaf is fetched at its first use, behind barriers: the transfer waits for the
    result before, and its use for what was sent back before. Where one parameter's state takes
    more than `CHUNK` bytes and its update allows it, it comes, is updated and goes in pieces.

    With ``on_host=False`` the state is on the device and stays there, and only the order and the
    pieces matter: XLA fuses the end of several parameters' updates otherwise, with all that they
    need alive.

    With an ``index``, state and parameters are stacks of layers (the gradients are that layer's),
    and the results are the stacks with that layer replaced, the first of them in the place of the
    parameters.

    An update that is streamed inside of another leaves it to that one.
    """
    if nested():
        return update(gradients, state, params, **extra)
    token = _nested.set(True)
    try:
        staged = _Stream(update, gradients, state, params, extra, index, on_host)
    finally:
        _nested.reset(token)
    if on_host and index is None:
        staged.warn_of_what_is_taken_whole(state)
    return staged.run()


class _Stream:
    """A traced update, and how far it has come."""

    def __init__(self, update, gradients, state, params, extra, index, on_host):
        leaves, call = jaxprs.split_arrays(update, (gradients, state, params), extra)
        self.index = index
        # The state and the parameters of all layers, of which each array gives one.
        self.stacked = _ids((state, params)) if index is not None else set()
        # What is on the device and comes in order all the same.
        self.ordered = set() if on_host else _ids(list(filter(offloadable, jax.tree.leaves(state))))
        self.flat = flat = jaxprs.flatten(
            call, [_stand_in(leaf, id(leaf) in self.stacked) for leaf in leaves]
        )
        self.operands = [*flat.consts, *leaves]
        self.maker = {value: step for step in flat.steps for value in step.outputs}
        self.values: dict[int, Any] = {}  # what is computed, by number
        self.come = 0  # the gradients and staged leaves among them, as bits
        self.results: dict[int, Any] = {}  # what is settled, by place among the results
        self.awaited: list[Any] = []  # what a transfer to the device waits for
        self.done: list[Any] = []
        self.sent: list[Any] = []  # what went to the host with the result before, and with this
        self.sending: list[Any] = []

        self.first, self.rest = jax.tree.unflatten(flat.out_tree, range(len(flat.outputs)))
        first, rest = jax.tree.leaves(self.first), jax.tree.leaves(self.rest)
        self.gradient = dict(zip(first, jax.tree.leaves(gradients), strict=False))
        alike = jax.tree.structure(self.first) == jax.tree.structure(params)
        self.parameter = dict(zip(first, jax.tree.leaves(params), strict=True)) if alike else {}
        self.origin = dict(zip(rest, jax.tree.leaves(state), strict=True))
        self.homes: dict[int, Any] = {}
        if index is not None:
            self.homes = self.origin | self.parameter
        self.going = {
            at: made
            for at in ([*first, *rest] if self.homes else rest)
            if isinstance(made := flat.outputs[at], int) and offloadable(flat.avals[made])
        }
        # Which gradients and staged leaves each value is made of, as bits.
        moved = _ids(gradients) | self.stacked | self.ordered
        self.staged = sum(
            1 << number
            for number, operand in enumerate(self.operands)
            if _on_host(operand) or id(operand) in self.ordered
        )
        self.made_of = {
            number: 1 << number if id(operand) in moved or self.staged >> number & 1 else 0
            for number, operand in enumerate(self.operands)
        }
        for step in flat.steps:
            parts = functools.reduce(operator.or_, (self.made_of[v] for v in step.uses), 0)
            self.made_of.update(dict.fromkeys(step.outputs, parts))

    def warn_of_what_is_taken_whole(self, state: Any) -> None:
        """A loop or a branch around the update takes the state of all parameters at once."""
        paths = {id(leaf): path for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        for step in self.flat.steps:
            if step.primitive not in ("cond", "scan", "while"):
                continue
            given = [self.operands[n] for n in sorted(set(step.uses)) if n < self.flat.input_count]
            taken = [leaf for leaf in given if id(leaf) in paths and _on_host(leaf)]
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in taken)
            if size > CHUNK:
                first = jax.tree_util.keystr(paths[id(taken[0])])
                warnings.warn(
                    f"jaxmem.offload has all of {format_bytes(size)} of the optimizer's state "
                    f"(state{first} is the first) on the device at once: a {step.primitive} around "
                    "the update takes it. Offload inside: "
                    "jaxmem.accumulate(jaxmem.offload(optimizer), every), which also leaves out "
                    "gradients that are not finite.",
                    JaxmemWarning,
                    stacklevel=4,
                )
                return

    def run(self) -> tuple[Any, Any]:
        # In the order in which the backward pass makes the gradients: each update waits for the one
        # before it, and a gradient that waits is in memory.
        first = list(reversed(self.gradient))
        made = dict(
            zip(first, jaxprs.making_order([self.gradient[at] for at in first]), strict=True)
        )
        first = [*sorted(first, key=made.__getitem__), *jax.tree.leaves(self.first)]
        for at in [*first, *jax.tree.leaves(self.rest)]:
            if at in self.results:
                continue
            self.sent, self.sending = self.sending, []
            self.awaited = self.done or [self.gradient[at]] if at in self.gradient else self.done
            wanted = self.flat.outputs[at]
            if isinstance(wanted, int) and not self.in_pieces(at, wanted):
                self.compute(wanted)
            if at not in self.results:
                self.settle(at)
            for other in sorted(self.going.keys() - self.results.keys()):
                if not self.made_of[self.going[other]] & ~self.come:  # all that it takes has come
                    self.compute(self.going[other])
                    self.settle(other)
        return jax.tree.unflatten(
            self.flat.out_tree, [self.results[at] for at in range(len(self.results))]
        )

    def bring(self, number: int) -> None:
        operand = self.operands[number]
        if id(operand) in self.stacked:
            operand = fetch(operand, self.index, self.awaited)
        elif self.staged >> number & 1:
            operand, *_ = jax.lax.optimization_barrier((operand, *self.awaited))
            operand = to_device(operand)
            operand, *_ = jax.lax.optimization_barrier((operand, *self.sent))
        self.values[number] = operand
        self.come |= self.made_of[number]

    def compute(self, wanted: int) -> None:
        pending = [wanted]
        while pending:
            number = pending[-1]
            if number in self.values:
                pending.pop()
            elif number < self.flat.input_count:
                self.bring(number)
            else:
                step = self.maker[number]
                missing = [value for value in step.uses if value not in self.values]
                if missing:
                    pending.extend(missing)
                else:
                    self.flat.run([step], self.values)

    def settle(self, at: int) -> None:
        value = jaxprs.read(self.values, self.flat.outputs[at])
        if at in self.going:
            self.done = [value]
        if at in self.homes:
            value = store(self.homes[at], value, self.index)
        elif at in self.going and _on_host(self.origin[at]):
            value = jax.device_put(value, jaxprs.HOST)
            self.sending.append(value)
        self.results[at] = value

    # ---- pieces

    def in_pieces(self, at: int, wanted: int) -> bool:
        """Whether the result, and what else is made of the same state, was done in pieces."""
        coming = self.made_of[wanted] & self.staged & ~self.come
        if self.index is not None or not coming:
            return False
        avals = [self.flat.avals[n] for n in range(self.flat.input_count) if coming >> n & 1]
        size = sum(aval.size * max(aval.dtype.itemsize, 4) for aval in avals)
        if size <= CHUNK:
            return False
        group = {at: wanted}
        for other, made in self.going.items():
            needs = self.made_of[made] & self.staged & ~self.come
            if other not in self.results and needs and not needs & ~coming:
                group[other] = made
        most, length = pieces(self.flat.avals[wanted].shape, size, CHUNK)
        for axes in range(most, 0, -1):
            slicing = find(
                self.flat,
                list(group.values()),
                axes,
                self.values.__contains__,
                lambda value: bool(self.made_of[value] & coming),
            )
            if slicing is not None and self.stays_in_place(slicing):
                self.sweep(at, slicing, group, length if axes == most else 1)
                return True
        return False

    def stays_in_place(self, slicing: Slicing) -> bool:
        """Whether no axis that is cut lies across devices, as far as is known."""
        arrays = [self.operands[n] for n in slicing.sliced if n < self.flat.input_count]
        return slicing.constrained or not any(map(jaxprs.on_several_devices, arrays))

    def sweep(self, at: int, slicing: Slicing, group: dict[int, int], length: int) -> None:
        """The results of a group, each written piece by piece over what it is made of."""
        arrays, written = {}, {}  # by place among the results; from number to that place
        for value in (*slicing.whole, *slicing.sliced):
            if not self.staged >> value & 1:
                self.compute(value)
        waits = [*self.awaited, *self.sent, self.gradient.get(at, ())]
        for place, made in group.items():
            aval = self.flat.avals[made]
            array: Any = self.origin.get(place, self.gradient.get(place))
            if (array.shape, array.dtype) != (aval.shape, aval.dtype):
                # Room for what is written; made with this update and not all at the beginning.
                zero, *_ = jax.lax.optimization_barrier((jnp.zeros((), aval.dtype), *waits))
                arrays[place] = jnp.broadcast_to(zero, aval.shape)
                continue
            number = next(n for n, operand in enumerate(self.operands) if operand is array)
            if self.staged >> number & 1:
                array, *_ = jax.lax.optimization_barrier((array, *waits))
            arrays[place], written[number] = array, place

        def piece(arrays, start, lengths):
            arrays = dict(arrays)
            values = {value: self.values[value] for value in slicing.whole}
            for value in slicing.sliced:
                if value in written:
                    array = arrays[written[value]]
                else:
                    array = self.values[value] if value in self.values else self.operands[value]
                values[value] = to_device(take(array, start, lengths))
            slicing.run(values, start, lengths)
            for place, made in group.items():
                new = values[made]
                new = jax.device_put(new, jaxprs.HOST) if _on_host(arrays[place]) else new
                arrays[place] = put(arrays[place], new, start)
            return arrays

        *outer, last = slicing.lead
        whole, rest = divmod(last, length)
        for count, size, offset in ((whole, length, 0), (1, rest, last - rest)):

            def body(turn, arrays, count=count, size=size, offset=offset):
                *start, number = jnp.unravel_index(turn, (*outer, count))
                lengths = (*[1] * len(outer), size)
                return piece(arrays, (*start, number * size + offset), lengths)

            if size:
                arrays = jax.lax.fori_loop(0, math.prod(outer) * count, body, arrays)
        for place, made in group.items():
            # What lies on a mesh as the update says does so whole too, not only each piece.
            step = self.maker.get(made)
            if step and step.primitive == "sharding_constraint" and not _on_host(arrays[place]):
                (arrays[place],) = jaxprs.evaluate(step, [arrays[place]])
        self.results.update(arrays)
        self.sending += [array for place, array in arrays.items() if place in self.going]
        # The next update waits for the parameter itself, which the caller is to make of this one
        # (the same sum: XLA makes it once). Waiting for less, XLA keeps all gradients.
        result, parameter = self.results[at], self.parameter.get(at)
        self.done = [result if parameter is None else optax.apply_updates(parameter, result)]


def _ids(tree: Any) -> set[int]:
    return {id(leaf) for leaf in jax.tree.leaves(tree)}


def _on_host(leaf: Any) -> bool:
    return jaxprs.memory_space(leaf) is jaxprs.HOST


def _stand_in(leaf: Any, stacked: bool) -> Any:
    """What the update is traced with: the leaf in device memory, one layer of a stack."""
    if not stacked and not _on_host(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape[1:] if stacked else leaf.shape, leaf.dtype)


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Zeros in host memory, where they are to go there."""
    return to_host(jnp.zeros(shape, dtype))
