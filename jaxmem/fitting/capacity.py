"""The largest number for which a step fits, by compilation alone: a batch, or any other."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.ground.bytes import device_budget, format_against, format_bytes
from jaxmem.ground.checks import check_callable, is_count
from jaxmem.ground.errors import JaxmemError
from jaxmem.rematerialization import Outcome, PendingCompilation, Search
from jaxmem.reports import MemoryReport, memory
from jaxmem.targets import LocalDevice, Target, family_of, resolve

# Times the largest that fits: how far to go on where the arguments do not grow. Chosen: bytes that
# grow with the square are passed by so much that what is compiled stays small. At half
# tests/test_max_batch.py finds less of bytes that grow as a root; at twice it passes.
_MAX_GROWTH = 8
# Times what larger numbers grow by: where bytes rise by more than that there is a jump. Chosen: of
# the formulas in tests/test_max_batch.py 1.2 to 3 find as much: half and twice of it.
_JUMP_RATIO = 1.4


@dataclasses.dataclass(frozen=True, repr=False)
class Largest:
    """The answer of `largest` and of `max_batch_size`: ``int(answer)`` is the number.

    Attributes:
        size: the largest number found; 0: not even the smallest one fits.
        too_large: the smallest larger one that was compiled and does not fit; None: none was.
        multiple: of which every number tried is one.
        budget: bytes allowed.
        compiled: device bytes of each number compiled, the largest first.
        report: of the number found, or of the smallest one if nothing fits.
        what: what the number is of, in a word.
        most: the largest number that was to be tried; None: any.
    """

    size: int
    too_large: int | None
    multiple: int
    budget: int
    compiled: dict[int, int]
    report: MemoryReport = dataclasses.field(compare=False)
    what: str = "number"
    most: int | None = None

    def __int__(self):
        return self.size

    __index__ = __int__

    @property
    def exact(self) -> bool:
        """Whether the next multiple was compiled too, and does not fit."""
        return self.too_large == self.size + self.multiple

    @property
    def reason(self) -> str:
        """Why no larger batch is the answer, in a sentence."""
        allowed = f"the budget of {format_bytes(self.budget)}"
        if not self.size:
            argument_bytes = format_bytes(self.report.argument)
            return (
                f"Nothing fits: a {self.what} of {self.multiple} takes "
                f"{format_against(self.report.device, self.budget)}, more than {allowed}, of which "
                f"{argument_bytes} are arguments{_holders(self.report)}. jaxmem.fit searches what "
                "makes it fit."
            )
        if self.most and self.size + self.multiple > self.most:
            return f"It is the largest {self.what} that was to be tried."
        if self.too_large is None:
            return f"No larger {self.what} was compiled; there may be one within {allowed}."
        next_one = "the next multiple" if self.exact else "the next one compiled"
        takes = format_against(self.compiled[self.too_large], self.budget)
        return f"{self.too_large}, {next_one}, takes {takes}, more than {allowed}."

    def __str__(self):
        share = self.report.device / self.budget
        takes = {size: format_against(count, self.budget) for size, count in self.compiled.items()}
        width = max(14, *(len(text) + 2 for text in takes.values()))
        lines = [
            f"largest {self.what}: {self.size} (a multiple of {self.multiple}) on "
            f"{self.report.target}",
            f"{self.what:>10}{'compiled':>{width}}{'of budget':>12}",
        ]
        for size, count in self.compiled.items():
            lines.append(f"{size:>10}{takes[size]:>{width}}{count / self.budget:>12.1%}")
        lines.append(self.reason)
        if self.size and share < 0.9 and self.exact:  # chosen: most end above that
            lines.append("XLA's bytes jump between the two: it lays out the larger one otherwise.")
        return "\n".join(lines)

    __repr__ = __str__


def largest(
    make: Callable[[int], tuple[Callable, tuple]],
    *,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
    multiple: int = 1,
    most: int | None = None,
    compilations: int = 7,  # chosen: it bounds the time; most searches end sooner
) -> Largest:
    """The largest integer for which a step fits, by compiling: nothing runs.

    It may be any number that a step depends on: a batch, the length of a sequence, how many
    particles there are, the chunk of a `jax.lax.map`, the states that a loop keeps. Bytes need not
    be a line, nor rise everywhere: the answer was compiled and fits, and ``too_large``, if there is
    one, was compiled and does not.

    Args:
        make: ``make(n)`` returns ``(step, args)``: a function, a jitted one or a `TrainStep`, and
            the tuple of its arguments, best as `jax.ShapeDtypeStruct`.
        budget: device bytes for the whole step, an int or text; None: what is usable on the target,
            which counts too where the budget is more (`JaxmemWarning`).
        target: the accelerator to compile for, present or not; None: the attached device.
        multiple: of which the number is to be one, its smallest value too.
        most: the largest number to try; None: any.
        compilations: how many at most.

    Raises:
        JaxmemError: ``make`` returns something else, or the target is not known; or what `memory`
            raises.
        BudgetError: the budget does not parse.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def make(chunk):
    ...     def step(x):
    ...         return jax.lax.map(lambda y: jnp.sin(y) @ jnp.cos(y).T, x, batch_size=chunk)
    ...     return step, (jax.ShapeDtypeStruct((64, 128, 128), jnp.float32),)
    >>> answer = jaxmem.largest(make, budget="20MiB", target="local", most=64)
    >>> 1 <= int(answer) <= 64, answer.report.device <= 20 * 2**20
    (True, True)
    """
    if not callable(make):
        raise JaxmemError(
            "jaxmem.largest takes make, a function of an integer that returns (step, args); got "
            f"{make!r}."
        )

    def make_step(number: int) -> tuple[Callable, tuple]:
        found = make(number)
        pair = isinstance(found, tuple | list) and len(found) == 2
        if not pair or not callable(found[0]) or not isinstance(found[1], tuple | list):
            raise JaxmemError(
                f"make({number}) must return (step, args), a function and the tuple of its "
                f"arguments; it returned a value of type {type(found).__name__}."
            )
        return found[0], tuple(found[1])

    return _found(make_step, budget, resolve(target), multiple, most, compilations, "number")


def max_batch_size(
    step: Callable,
    make_args: Callable[[int], tuple],
    *,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
    multiple: int | None = None,
    compilations: int = 6,  # chosen: it bounds the time; most searches end sooner
) -> Largest:
    """The largest batch whose step fits, by compiling: nothing runs, nothing runs out of memory.

    The smallest batch is compiled, and the one that its bytes beside those of the state point to;
    from then on each next one is where the line through the two nearest ones meets the budget.
    Bytes are not quite a line, nor do they always rise with the batch (XLA chooses layouts,
    fusions and, near the end of a device's memory, its own rematerialization by size). So what
    holds is this: the answer was compiled and fits, and ``too_large``, if there is one, was
    compiled and does not; with ``exact`` it is the next multiple.

    Args:
        step: a function, a jitted one, or a `TrainStep`.
        make_args: ``make_args(batch)``: the tuple of the step's arguments at a batch size, best
            as `jax.ShapeDtypeStruct` (with real arrays the largest batch is allocated).
        budget: device bytes for the whole step, an int or text; None: what is usable on the target,
            which counts too where the budget is more (`JaxmemWarning`).
        target: the accelerator to compile for, present or not; None: the attached device.
        multiple: of which the batch is to be one, its smallest value too; None: of 8 and of the
            number of devices of the target.
        compilations: how many at most.

    Raises:
        JaxmemError: ``make_args`` returns no tuple or the same shapes for every batch, the target
            is not known; or what `memory` raises.
        BudgetError: the budget does not parse.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def step(w, x):
    ...     return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    >>> def make_args(batch):
    ...     return jnp.ones((64, 64)), jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    >>> answer = jaxmem.max_batch_size(step, make_args, budget="1MiB", target="local")
    >>> int(answer) % 8, answer.report.device <= 2**20
    (0, True)
    """
    check_callable(step, "jaxmem.max_batch_size")
    chosen = resolve(target)
    if multiple is None:
        multiple = math.lcm(family_of(chosen.known).shape_multiple, chosen.count)
    if not callable(make_args):
        raise JaxmemError(
            "jaxmem.max_batch_size takes make_args, a function of the batch size that returns the "
            f"step's arguments; got {make_args!r}."
        )

    def make_step(batch: int) -> tuple[Callable, tuple]:
        args = make_args(batch)
        if not isinstance(args, tuple | list):
            raise JaxmemError(
                f"make_args({batch}) must return the tuple of the step's arguments; it returned a "
                f"value of type {type(args).__name__}."
            )
        return step, tuple(args)

    if is_count(multiple, 1) and _argument_slope(make_step, multiple)[1] <= 0:
        raise JaxmemError(
            f"make_args returns arguments of the same sizes for batches of {multiple} and "
            f"{2 * multiple}: no batch can be too large. Give the batch's arrays the size that it "
            "is called with."
        )
    return _found(make_step, budget, chosen, multiple, None, compilations, "batch")


MakeStep = Callable[[int], tuple[Callable, tuple]]


def _found(make_step: MakeStep, budget, target, multiple, most, compilations, what: str) -> Largest:
    allowed = device_budget(budget, target.usable_bytes, target.name)
    for name, value, least in (("multiple", multiple, 1), ("compilations", compilations, 2)):
        if not is_count(value, least):
            raise JaxmemError(f"{name}= takes an int of {least} or more; got {value!r}.")
    if most is not None and not is_count(most, multiple):
        raise JaxmemError(f"most= takes an int of {multiple} or more; got {most!r}.")
    capacity = _Capacity(make_step, target, allowed, compilations, multiple, most, what)
    capacity.search.run(capacity.rounds(), capacity.start)
    return capacity.answer()


class _Capacity:
    """Numbers compiled so far, by how many multiples they are."""

    def __init__(
        self, make_step: MakeStep, target, budget: int, compilations: int, multiple: int, most, what
    ):
        self.make_step, self.target, self.what = make_step, target, what
        self.budget, self.multiple, self.most = budget, multiple, most
        self.search: Search[int] = Search(budget, compilations)
        self.reports: dict[int, MemoryReport] = {}
        fixed, growth = _argument_slope(make_step, multiple)
        self.grows = growth > 0
        self.fixed, self.growth = fixed // target.count, max(growth / target.count, 1e-9)

    def rounds(self) -> Iterator[Sequence[int]]:
        """The smallest, then where the bytes known so far point to."""
        count: int | None = 1
        while count:
            yield [count]
            count = self.next()

    def start(self, count: int) -> PendingCompilation:
        """The step of a number, which is compiled when it is waited for."""
        said = f"{self.what} {count * self.multiple} for {self.target.name}"
        return PendingCompilation(said, functools.partial(self._compile, count, said), lambda: None)

    def _compile(self, count: int, said: str) -> Outcome:
        step, args = self.make_step(count * self.multiple)
        report = self.reports[count] = memory(step, *args, target=self.target)
        verdict = "fits" if report.device <= self.budget else "does not fit"
        of_arguments = round(self.fixed + self.growth * count)
        return Outcome(
            f": {said}: {format_against(report.device, self.budget)}, {verdict}",
            -count,
            of_arguments,
            report.device,
            self.what,
        )

    def next(self) -> int | None:
        """How many multiples to compile next; None: the answer is known."""
        fits, fails = self._bracket()
        last = self.most // self.multiple if self.most else None
        if not fits or fails == fits + 1 or fits == last:
            return None
        wanted = max(self._interpolate(fits, fails), fits + 1)
        return min(wanted, *(end for end in (fails and fails - 1, last) if end), wanted)

    def _interpolate(self, fits: int, fails: int | None) -> int:
        """Where the bytes known meet the budget."""
        known = {count: report.device for count, report in self.reports.items()}
        if len(known) == 1:
            known[0] = self.fixed if self.grows else 0
        high = fails or fits
        low = max(count for count in known if count < high)
        slope = max((known[high] - known[low]) / (high - low), self.growth)
        if not fails and len(known) > 2:  # a stretch that happens to be flat points too far
            slope = max(slope, (known[high] - self.fixed) / high / 2)
        met = low + (self.budget - known[low]) / slope
        if not fails and not self.grows:
            # Of what does not show in the arguments nothing is known beyond what was compiled.
            met = min(met, _MAX_GROWTH * fits)
        elif fails and len(known) > 2:
            met = min(
                self._parabola_root(known, fits, fails) or met, self._step_limit(known, fits, fails)
            )
        return int(min(met, 2**62))

    def _parabola_root(self, known: dict[int, int], fits: int, fails: int) -> float | None:
        """Where the parabola through both ends and one more meets the budget between them. The one
        more is the next that does not fit either, if there is one: small numbers may be bound by
        what large ones are not."""
        above = [count for count in known if count > fails]
        third = min(above) if above else max(count for count in known if count < fits)
        counts = [fits, fails, third]
        parabola = np.polyfit(counts, [known[count] - self.budget for count in counts], 2)
        roots = [root.real for root in np.roots(parabola) if abs(root.imag) < 1e-9]
        return next((root for root in roots if fits < root < fails), None)

    def _step_limit(self, known: dict[int, int], fits: int, fails: int) -> float:
        """What to try at most, where XLA seems to run small numbers in another way than large ones,
        with a jump between: where the line through the two next that do not fit meets the budget,
        then a third of the way, since only what fits is an answer."""
        above = min((count for count in known if count > fails), default=None)
        if above is None or known[above] <= known[fails]:
            return math.inf
        slope = (known[above] - known[fails]) / (above - fails)
        if known[fails] - known[fits] < _JUMP_RATIO * slope * (fails - fits):
            return math.inf
        met = fails - (known[fails] - self.budget) / slope
        third = (fails - fits) / 3
        return met if fits + third < met < fails else fits + third

    def answer(self) -> Largest:
        """The largest that was found."""
        fits, fails = self._bracket()
        return Largest(
            fits * self.multiple,
            fails and fails * self.multiple,
            self.multiple,
            self.budget,
            {
                count * self.multiple: self.reports[count].device
                for count in sorted(self.reports, reverse=True)
            },
            self.reports[fits or 1],
            self.what,
            self.most,
        )

    def _bracket(self) -> tuple[int, int | None]:
        """The largest that fits (0: none), and the smallest above it that does not."""
        fits, fails = self.search.bracket({count: count for count in self.reports})
        return int(fits), None if math.isinf(fails) else int(fails)


def _argument_slope(make_step: MakeStep, multiple: int) -> tuple[int, int]:
    """Bytes of the arguments: those that do not depend on the number, and what one more multiple
    adds."""
    one, two = (
        sum(
            math.prod(jnp.shape(leaf)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(make_step(times * multiple)[1])
            if hasattr(leaf, "dtype")
        )
        for times in (1, 2)
    )
    return 2 * one - two, two - one


def _holders(report: MemoryReport) -> str:
    """What is largest at the peak, in words."""
    if not report.has_timeline:
        return ""
    top = list(report.by_source.items())[:3]
    named = ", ".join(f"{format_bytes(size)} by {line}" for line, size in top)
    return f"; at the peak {named}"
