"""A plan onto a program: its kernels evaluated in order, regions as nested `jax.checkpoint`."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, Protocol

import jax

from jaxmem import jaxprs
from jaxmem.frameworks.modules import on_arrays
from jaxmem.loops import checkpointed_scan, split_scan
from jaxmem.planning import Loop, Region, Segment, recomputed, saved_by
from jaxmem.program import (
    Kernel,
    Program,
    apply_compiler_rules,
    read_program,
)
from jaxmem.program.derivatives import DERIVATIVES, Derivative
from jaxmem.rematerialization.parting import is_parted, part_passes, stretch_reads, tied_values
from jaxmem.rematerialization.segments import run_segments
from jaxmem.rematerialization.sequencing import is_expensive, sequence_recomputation
from jaxmem.rematerialization.traced import flattened, input_names
from jaxmem.targets import Rules

_EMISSIONS = itertools.count()


class EmissionSpec(Protocol):
    """What is emitted of a plan: regions and loops, and by what rules the compiler goes."""

    @property
    def regions(self) -> tuple[Region, ...]: ...

    @property
    def loops(self) -> tuple[Loop, ...]: ...

    @property
    def segments(self) -> tuple[Segment, ...]: ...

    @property
    def rules(self) -> Rules: ...


# The layout for a program, given what returns the names and types of the program's inputs.
LayoutFor = Callable[[Program, Callable[[], Sequence[tuple[str, str]]]], EmissionSpec]


def planned_function(
    fun: Callable,
    layout_for: LayoutFor,
    keeps_regions: bool = False,
    differentiated: Sequence[int] | None = None,
) -> Callable:
    """``fun`` as a function that is traced when it is called, and emitted with a layout in place of
    its own regions, or beside them; ``differentiated`` are the inputs that gradients are expected
    to be taken of, None: all. Gradients by others are as right, and take other bytes."""

    @functools.wraps(fun)
    def planned(*args, **kwargs):
        def evaluate(call, leaves):
            closed, tree = jaxprs.traced_jaxpr(call, leaves)
            jaxprs.check_rules(closed, jaxprs.taken_derivatives(leaves))
            flat = flattened(closed, tree, not keeps_regions)
            wanted = None if differentiated is None else frozenset(differentiated)
            program = read_program(flat, wanted)
            layout = layout_for(program, lambda: input_names(program, fun, args, kwargs))
            return emit(flat, program, layout, leaves)

        return on_arrays(evaluate, fun, args, kwargs)

    # Flax linen wraps the methods of a module, and would wrap this one around its own wrapper
    # (as for nn.remat): what is captured of a call would be there twice.
    planned.method_handler_wrapped = True  # type: ignore[attr-defined]
    planned.unplanned = fun  # type: ignore[attr-defined]
    return planned


def emit(
    flat: jaxprs.FlatJaxpr, program: Program, layout: EmissionSpec, leaves: Sequence[Any]
) -> Any:
    """The results of a traced function on ``leaves``, with the regions and loops of a layout, or
    with its segments."""
    if layout.segments:
        return run_segments(flat, layout.segments, leaves)
    program = apply_compiler_rules(program, layout.rules)
    values = dict(enumerate([*flat.consts, *leaves]))
    loops = {loop.kernel: loop for loop in layout.loops}
    # Of what recomputes nothing, the function is as its author wrote it: a barrier would hold the
    # cotangents of several heads at once.
    recomputes = bool(layout.regions or layout.loops)
    emission = _Emission(flat, program, loops, layout.regions, adds_barriers=recomputes)
    emission.run(0, len(program.kernels), layout.regions, values)
    flat.run(flat.prints, values)
    return jax.tree.unflatten(flat.out_tree, emission.outputs(values))


class _OpenRegion(NamedTuple):
    """A region that is being written, the latest value that it reads, and the regions around it
    that would recompute or keep more to have that."""

    region: Region
    latest_input: Any
    expensive_in: Set[Region]


@dataclasses.dataclass
class _Emission:
    """Evaluates kernels of a program.

    Regions compute the fused operations that they read for themselves, so that what passes from
    one to the next is in memory anyway. Values that are saved have names, which the
    policies of the regions know.

    A region begins when all that it reads is there. Without that, XLA would begin what regions
    inside a recomputed one compute all at once, merge it, and hold results long before they are
    needed.
    """

    flat: jaxprs.FlatJaxpr
    program: Program
    loops: dict[int, Loop]
    regions: Sequence[Region]
    in_loop: bool = False
    dropped: Set[int] = frozenset()  # results that nobody asks for
    adds_barriers: bool = True  # whether barriers part loops from what comes after them

    def __post_init__(self):
        self.saved = saved_by(self.regions)
        self.stacks_rows = self.in_loop and _stacks_rows(self.flat)
        # Names that no other emission has: a policy around this one must not know them.
        self.prefix = f"jaxmem:{next(_EMISSIONS)}"
        # The regions that are being written, outermost first.
        self.open_regions: list[_OpenRegion] = []

    @functools.cached_property
    def recomputed(self) -> dict[Region, frozenset[int]]:
        """The kernels that each region runs again; asked for where regions are nested."""
        return recomputed(self.program, self.regions)

    @functools.cached_property
    def readers(self) -> collections.Counter[int]:
        """How many operations read each value."""
        return collections.Counter(value for step in self.flat.steps for value in step.uses)

    @functools.cached_property
    def used_values(self) -> frozenset[int]:
        """The values that an operation reads, or somebody asks for."""
        return frozenset(self.readers) | (frozenset(self.flat.observed) - self.dropped)

    def run(self, start: int, stop: int, regions: Sequence[Region], values: dict[int, Any]) -> None:
        """Kernels ``start`` to ``stop - 1``, reading and writing ``values`` by number."""
        for before, region in zip([None, *regions], regions, strict=False):
            self.evaluate_behind(before, start, region.start, values)
            if before is not None:
                sequence_recomputation(self.program, before, region, values)
            self.checkpointed(region, values)
            if any(region.start <= scan < region.stop for scan in self.program.scans):
                part_passes(self.program, region.stop, values)
            start = region.stop
        self.evaluate_behind(regions[-1] if regions else None, start, stop, values)

    def evaluate_behind(
        self, before: Region | None, start: int, stop: int, values: dict[int, Any]
    ) -> None:
        """Kernels behind a region."""
        if before is not None:
            stretch = Region(start, stop)
            tied = tied_values(self.program, stretch, stretch_reads(self.program, stretch))
            parted = jaxprs.cotangent_barrier([values[value] for value in tied])
            values.update(zip(tied, parted, strict=True))
        self.evaluate(start, stop, values)

    def outputs(self, values: dict[int, Any]) -> list[Any]:
        """The results of the program once its kernels have run, numbers of its own as arrays; None:
        nobody asks for it."""
        values = values | dict.fromkeys(self.dropped)
        return [jaxprs.as_array(jaxprs.read(values, out)) for out in self.flat.outputs]

    def name(self, value: int) -> str:
        """What the policies of this emission's regions call a value."""
        return f"{self.prefix}:{value}"

    def evaluate(self, start: int, stop: int, values: dict[int, Any]) -> None:
        fused: dict[int, Any] = {}
        for number in range(start, stop):
            kernel = self.program.kernels[number]
            *before, last = [self.flat.steps[index] for index in kernel.operations]
            inside = {value: values[value] for value in kernel.sources}
            for step in before:
                # Kernels side by side share what is fused into both: cotangents add up there.
                if fused.keys().isdisjoint(step.outputs):
                    self.flat.run([step], inside)
                    fused |= {out: inside[out] for out in step.outputs}
                inside |= {out: fused[out] for out in step.outputs}
            if number in self.loops:
                run = self.mapped if last.primitive == "shard_map" else self.looped
                run(self.loops[number], last, inside)
            elif own := _derivative(self.program.rules, last, kernel):
                operands = [jaxprs.read(inside, operand) for operand in last.inputs]
                alone = all(self.readers[value] == 1 for value in last.uses)
                inside[last.outputs[0]] = own.emit(last, operands, alone)
            else:
                self.flat.run([last], inside)
            for value in kernel.results:
                if value not in inside:
                    continue  # no value of the function's, or one that nothing reads
                if value in self.saved:
                    named = jaxprs.named(inside[value], self.name(value))
                    named = jaxprs.row_major(named) if self.stacks_rows else named
                    values[value] = self.delayed_until_region(value, named)
                else:
                    values[value] = inside[value]
            if self.adds_barriers and is_parted(self.program, number, self.loops.get(number)):
                part_passes(self.program, number + 1, values)
                fused.clear()  # what follows is made from the parted values

    def delayed_until_region(self, value: int, saved: Any) -> Any:
        """A saved value, for what reads it: in the recomputation of a region around its own, where
        it is there from the beginning, it waits for its own region's turn.

        Unless that would recompute or keep more, where the latest that the region reads is not
        needed. (What it reads before is there no sooner: all of it passes one barrier.)
        """
        if len(self.open_regions) < 2:
            return saved
        *outer, (_, latest, expensive) = self.open_regions
        keepers = {one.region for one in outer if value in one.region.saved}
        if latest is None or not keepers.isdisjoint(expensive):
            return saved
        return jaxprs.order_after(saved, latest)

    def checkpointed(
        self,
        region: Region,
        values: dict[int, Any],
        prevent_cse: bool = True,
        offloaded: Sequence[int] = (),
    ) -> None:
        kernels = self.program.kernels[region.start : region.stop]
        made = {value for kernel in kernels for value in kernel.results}
        reads = stretch_reads(self.program, region)
        keeps = [
            v for v in sorted(made & self.used_values) if self.program.last_used[v] > region.stop
        ]

        def run(*operands):
            inner = dict(zip(reads, operands, strict=True))
            tied = tied_values(self.program, region, reads)
            inner.update(zip(tied, jaxprs.cotangent_barrier([inner[v] for v in tied]), strict=True))
            made = [v for v in reads if v >= self.program.input_count and self.program.active[v]]
            inner.update(zip(made, jaxprs.barrier([inner[v] for v in made]), strict=True))
            for value in inner.keys() & set(offloaded):
                inner[value] = jaxprs.named(inner[value], self.name(value))
            if made:
                latest = max(made, key=lambda value: self.program.made[value])
                expensive = {
                    one.region
                    for one in self.open_regions
                    if is_expensive(self.program, latest, one.region, self.recomputed)
                }
                self.open_regions.append(_OpenRegion(region, inner[latest], expensive))
            else:
                self.open_regions.append(_OpenRegion(region, None, frozenset()))
            self.run(region.start, region.stop, region.regions, inner)
            self.open_regions.pop()
            return [inner[value] for value in keeps]

        names = (frozenset(map(self.name, values)) for values in (region.saved, offloaded))
        policy = jaxprs.NamePolicy(*names)
        wrapped = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
        values.update(zip(keeps, wrapped(*[values[value] for value in reads]), strict=True))

    def looped(self, loop: Loop, step: jaxprs.FlatStep, values: dict[int, Any]) -> None:
        """A scan whose body is a region, or is run by a schedule; whose first iterations may have
        another one."""
        options = step.equation.params
        operands = [jaxprs.as_array(jaxprs.read(values, operand)) for operand in step.inputs]
        parts = jaxprs.loop_of(step.equation)
        body = parts.body
        constants = [*body.consts, *operands[parts.body_consts]]
        carry, slices = operands[parts.carry], operands[parts.carry.stop :]
        stacked_as = step.outputs[len(carry) :]
        # XLA finds out that nothing reads what one loop stacks, and not of loops in loops.
        read = [at for at, value in enumerate(stacked_as) if value in self.used_values]
        one = self.iteration(loop, body, read)
        with jaxprs.context(step):
            if loop.schedule:
                carry, stacked = checkpointed_scan(
                    one, constants, carry, slices, loop.schedule, options["reverse"]
                )
            elif head := loop.head:
                first = self.iteration(head.loop, body, read)
                pieces = (head.count, first), (options["length"] - head.count, one)
                carry, stacked = split_scan(pieces, constants, carry, slices, options["reverse"])
            else:
                # XLA refuses a loop that sends several slices to host memory in one turn.
                unroll = 1 if loop.offloaded else options["unroll"]
                carry, stacked = jax.lax.scan(
                    functools.partial(one, constants), carry, slices,
                    options["length"], options["reverse"], unroll,
                )  # fmt: skip
        made = [*step.outputs[: len(carry)], *(stacked_as[at] for at in read)]
        for value, result in zip(made, [*carry, *stacked], strict=True):
            values[value] = jaxprs.match_weak_type(self.flat.avals[value], result)

    def mapped(self, loop: Loop, step: jaxprs.FlatStep, values: dict[int, Any]) -> None:
        """A `jax.shard_map` with regions in what each device runs."""
        operands = [jaxprs.as_array(jaxprs.read(values, operand)) for operand in step.inputs]
        body = jaxprs.mapped_body(step.equation)
        read = [at for at, value in enumerate(step.outputs) if value in self.used_values]
        one = self.iteration(loop, body, read)

        def run(*pieces):
            return one([], [], pieces)[1]

        with jaxprs.context(step):
            made = jaxprs.mapped_like(step, run, read)(*operands)
        values.update(zip((step.outputs[at] for at in read), made, strict=True))

    def iteration(self, loop: Loop, body: jaxprs.FlatJaxpr, read: Sequence[int]) -> Callable:
        """One iteration of a scan: constants, carry and slices to the next carry, and to those of
        its results that are read. Of what is mapped all operands are slices."""
        operation = self.program.operation_of(loop.kernel)
        program = self.program.body_of(loop.kernel)
        region = Region(0, len(program.kernels), loop.saved, loop.regions)
        loops = {inner.kernel: inner for inner in loop.loops}
        carried = len(operation.carry)
        kept = [*range(carried), *(carried + at for at in read)]
        dropped = _values(body.outputs) - _values([body.outputs[at] for at in kept])
        regions = loop.regions if loop.whole else [region]
        in_loop = operation.name == "scan"
        emission = _Emission(body, program, loops, regions, in_loop, dropped)
        emission.saved |= frozenset(loop.offloaded)

        def one(constants, carry, slices):
            inner = dict(enumerate([*constants, *carry, *slices]))
            if loop.whole:
                emission.run(0, len(program.kernels), loop.regions, inner)
            else:
                # The loop parts the forward pass from the recomputation: nothing to prevent.
                emission.checkpointed(region, inner, False, loop.offloaded)
            results = emission.outputs(inner)
            return results[:carried], [results[carried + at] for at in read]

        return one


def _derivative(rules: Rules, step: jaxprs.FlatStep, kernel: Kernel) -> Derivative | None:
    """The cheaper derivative of the operation that completes a kernel."""
    suiting = (one for one in DERIVATIVES if one.suits(rules))
    return next((one for one in suiting if one.matches(step, kernel)), None)


def _stacks_rows(flat: jaxprs.FlatJaxpr) -> bool:
    """Whether what is saved of a loop's body lies row by row, where compilers would have it
    otherwise. Not where there are convolutions, which have layouts of their own."""
    return all(step.primitive != "conv_general_dilated" for step in flat.steps)


def _values(results: Sequence[Any]) -> frozenset[int]:
    """Those of some results that are no literals."""
    return frozenset(x for x in results if isinstance(x, int))
