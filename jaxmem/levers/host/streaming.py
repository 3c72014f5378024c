"""An optimizer update on arrays in host memory, fetched and returned piece by piece.

XLA's scheduler alone would start every transfer at once, since nothing tells it not to.
"""

import contextvars
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.warn import warn
from jaxmem.levers.host.traced_update import TracedUpdate
from jaxmem.levers.host.transfers import fetch, on_host, store, to_device
from jaxmem.program.slicing import Slicing, find, pieces, put, take

# Bytes of state of one parameter, four at least a value, that are on the device at once: one such
# chunk comes while another goes. Chosen: for Adam on four matrices of 256 MiB half takes 64 MiB
# less, and twice 128 MiB more.
CHUNK = 64 * 2**20


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
    state_on_host: bool = True,
) -> tuple[Any, Any]:
    """``update(gradients, state, params, **extra)`` with what is on the host kept there.

    The results are computed one after another, each with the operations that it alone still
    needs. A host leaf is fetched at its first use, behind barriers: the transfer waits for the
    result before, and its use for what was sent back before. Where one parameter's state takes
    more than `CHUNK` bytes and its update allows it, it comes, is updated and goes in pieces.

    With ``state_on_host=False`` the state is on the device and stays there, and only the order
    and the pieces matter: XLA fuses the end of several parameters' updates otherwise, with all
    that they need alive.

    With an ``index``, state and parameters are stacks of layers (the gradients are that layer's),
    and the results are the stacks with that layer replaced, the first of them in the place of the
    parameters.

    An update that is streamed inside of another leaves it to that one.
    """
    if nested():
        return update(gradients, state, params, **extra)
    token = _nested.set(True)
    try:
        traced = TracedUpdate(update, gradients, state, params, extra, index, state_on_host)
    finally:
        _nested.reset(token)
    if state_on_host and index is None:
        _warn_of_state_taken_whole(traced, state)
    return _Stream(traced).run()


def _warn_of_state_taken_whole(update: TracedUpdate, state: Any) -> None:
    """A loop or a branch around the update takes the state of all parameters at once."""
    paths = {id(leaf): path for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    for step in update.flat.steps:
        if step.primitive not in ("cond", "scan", "while"):
            continue
        numbers = [number for number in sorted(set(step.uses)) if number < update.flat.input_count]
        given = [update.operands[number] for number in numbers]
        taken = [leaf for leaf in given if id(leaf) in paths and on_host(leaf)]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in taken)
        if size > CHUNK:
            first = jax.tree_util.keystr(paths[id(taken[0])])
            warn(
                f"jaxmem.offload has all of {format_bytes(size)} of the optimizer's state "
                f"(state{first} is the first) on the device at once: a {step.primitive} around "
                "the update takes it. Offload inside: "
                "jaxmem.accumulate(jaxmem.offload(optimizer), every), which also leaves out "
                "gradients that are not finite.",
            )
            return


class _Stream:
    """How far a traced update has come."""

    def __init__(self, update: TracedUpdate):
        self.update = update
        self.flat = update.flat
        self.values: dict[int, Any] = {}  # what is computed, by number
        self.fetched_mask = 0  # the gradients and staged leaves among them, as bits
        self.results: dict[int, Any] = {}  # what is settled, by place among the results
        self.transfer_deps: list[Any] = []  # what a transfer to the device waits for
        self.completed: list[Any] = []
        # What went to the host with the result before, and with this.
        self.previous_writes: list[Any] = []
        self.current_writes: list[Any] = []

    def run(self) -> tuple[Any, Any]:
        """The results, each computed when its turn has come."""
        for at in self._order():
            if at in self.results:
                continue
            self.previous_writes, self.current_writes = self.current_writes, []
            self.transfer_deps = self.completed
            if not self.completed and at in self.update.gradient:
                self.transfer_deps = [self.update.gradient[at]]
            wanted = self.flat.outputs[at]
            if isinstance(wanted, int) and not self.try_chunked(at, wanted):
                self.compute(wanted)
            if at not in self.results:
                self.write_back(at)
            for other, made in sorted(self.update.outgoing.items()):
                needed = self.update.made_of[made] & ~self.fetched_mask
                if other not in self.results and not needed:
                    self.compute(made)
                    self.write_back(other)
        return jax.tree.unflatten(
            self.flat.out_tree, [self.results[at] for at in range(len(self.results))]
        )

    def _order(self) -> list[int]:
        """The results by place: in the order in which the backward pass makes the gradients. Each
        update waits for the one before it, and a gradient that waits is in memory."""
        gradient = self.update.gradient
        first = list(reversed(gradient))
        making = jaxprs.making_order([gradient[at] for at in first])
        made = dict(zip(first, making, strict=True))
        first.sort(key=made.__getitem__)
        return [*first, *self.update.updates, *self.update.states]

    def fetch_operand(self, number: int) -> None:
        """An operand to the device, in its turn."""
        operand = self.update.operands[number]
        if self.update.is_stacked(number):
            operand = fetch(operand, self.update.index, self.transfer_deps)
        elif self.update.is_staged(number):
            operand, *_ = jax.lax.optimization_barrier((operand, *self.transfer_deps))
            operand = to_device(operand)
            operand, *_ = jax.lax.optimization_barrier((operand, *self.previous_writes))
        self.values[number] = operand
        self.fetched_mask |= self.update.made_of[number]

    def compute(self, wanted: int) -> None:
        """A value, from what is there and what it needs besides."""
        pending = [wanted]
        while pending:
            number = pending[-1]
            if number in self.values:
                pending.pop()
            elif number < self.flat.input_count:
                self.fetch_operand(number)
            else:
                step = self.update.maker[number]
                missing = [value for value in step.uses if value not in self.values]
                if missing:
                    pending.extend(missing)
                else:
                    self.flat.run([step], self.values)

    def write_back(self, at: int) -> None:
        """A computed result to where it belongs."""
        value = jaxprs.as_array(jaxprs.read(self.values, self.flat.outputs[at]))
        if at in self.update.outgoing:
            self.completed = [value]
        if at in self.update.stack:
            value = store(self.update.stack[at], value, self.update.index)
        elif at in self.update.outgoing and on_host(self.update.origin[at]):
            value = jax.device_put(value, jaxprs.HOST)
            self.current_writes.append(value)
        self.results[at] = value

    # ---- pieces

    def try_chunked(self, at: int, wanted: int) -> bool:
        """Whether the result, and what else is made of the same state, was done in pieces."""
        coming = self.update.made_of[wanted] & self.update.staged & ~self.fetched_mask
        if self.update.index is not None or not coming:
            return False
        result = self.flat.avals[wanted]
        if not (result.shape and result.size):
            return False  # nothing to cut
        avals = [self.flat.avals[n] for n in range(self.flat.input_count) if coming >> n & 1]
        size = sum(aval.size * max(aval.dtype.itemsize, 4) for aval in avals)
        if size <= CHUNK:
            return False
        group = {at: wanted}
        for other, made in self.update.outgoing.items():
            needs = self.update.made_of[made] & self.update.staged & ~self.fetched_mask
            if other not in self.results and needs and not needs & ~coming:
                group[other] = made
        most, length = pieces(result.shape, size, CHUNK)
        for axes in range(most, 0, -1):
            slicing = find(
                self.flat,
                list(group.values()),
                axes,
                self.values.__contains__,
                lambda value: bool(self.update.made_of[value] & coming),
            )
            if slicing is not None and self.stays_in_place(slicing):
                self.update_in_chunks(at, slicing, group, length if axes == most else 1)
                return True
        return False

    def stays_in_place(self, slicing: Slicing) -> bool:
        """Whether no axis that is cut lies across devices, as far as is known."""
        arrays = [self.update.operands[n] for n in slicing.sliced if n < self.flat.input_count]
        return slicing.constrained or not any(map(jaxprs.on_several_devices, arrays))

    def update_in_chunks(
        self, at: int, slicing: Slicing, group: dict[int, int], length: int
    ) -> None:
        """The results of a group, each written piece by piece over what it is made of."""
        arrays, written = {}, {}  # by place among the results; from number to that place
        for value in (*slicing.whole, *slicing.sliced):
            if not self.update.is_staged(value):
                self.compute(value)
        waits = [*self.transfer_deps, *self.previous_writes, self.update.gradient.get(at, ())]
        for place, made in group.items():
            aval = self.flat.avals[made]
            array: Any = self.update.origin.get(place, self.update.gradient.get(place))
            if (array.shape, array.dtype) != (aval.shape, aval.dtype):
                # Room for what is written; made with this update and not all at the beginning.
                zero, *_ = jax.lax.optimization_barrier((jnp.zeros((), aval.dtype), *waits))
                arrays[place] = jnp.broadcast_to(zero, aval.shape)
                continue
            number = next(n for n, operand in enumerate(self.update.operands) if operand is array)
            if self.update.is_staged(number):
                array, *_ = jax.lax.optimization_barrier((array, *waits))
            arrays[place], written[number] = array, place

        def piece(arrays, start, lengths):
            arrays = dict(arrays)
            values = {value: self.values[value] for value in slicing.whole}
            for value in slicing.sliced:
                if value in written:
                    array = arrays[written[value]]
                elif value in self.values:
                    array = self.values[value]
                else:
                    array = self.update.operands[value]
                values[value] = to_device(take(array, start, lengths))
            slicing.run(values, start, lengths)
            for place, made in group.items():
                new = values[made]
                new = jax.device_put(new, jaxprs.HOST) if on_host(arrays[place]) else new
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
            step = self.update.maker.get(made)
            if step and step.primitive == "sharding_constraint" and not on_host(arrays[place]):
                (arrays[place],) = jaxprs.evaluate(step, [arrays[place]])
        self.results.update(arrays)
        self.current_writes += [
            array for place, array in arrays.items() if place in self.update.outgoing
        ]
        # The next update waits for the parameter itself, which the caller is to make of this one
        # (the same sum: XLA makes it once). Waiting for less, XLA keeps all gradients.
        result, parameter = self.results[at], self.update.parameter.get(at)
        self.completed = [result if parameter is None else optax.apply_updates(parameter, result)]
