"""The largest batch that fits, by compilation alone."""

import dataclasses
import math
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem.ground.bytes import device_budget, format_bytes
from jaxmem.ground.checks import check_callable, is_count
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import MemoryReport, memory
from jaxmem.targets import LocalDevice, Target, family_of, resolve


@dataclasses.dataclass(frozen=True, repr=False)
class BatchSize:
    """The answer of `max_batch_size`: ``int(answer)`` is the batch.

    Attributes:
        size: the largest batch found; 0: not even the smallest one fits.
        too_large: the smallest batch that was compiled and does not fit; None: none was.
        multiple: of which every batch tried is one.
        budget: bytes allowed.
        compiled: device bytes of each batch compiled, by falling batch.
        report: of the batch found, or of the smallest one if nothing fits.
    """

    size: int
    too_large: int | None
    multiple: int
    budget: int
    compiled: dict[int, int]
    report: MemoryReport = dataclasses.field(compare=False)

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
            held = format_bytes(self.report.argument)
            return (
                f"Nothing fits: a batch of {self.multiple} takes "
                f"{format_bytes(self.report.device)}, more than {allowed}, of which {held} are "
                f"arguments{_holders(self.report)}. jaxmem.fit searches what makes it fit."
            )
        if self.too_large is None:
            return f"No larger batch was compiled; there may be one within {allowed}."
        next_one = "the next multiple" if self.exact else "the next one compiled"
        return (
            f"{self.too_large}, {next_one}, takes {format_bytes(self.compiled[self.too_large])}, "
            f"more than {allowed}."
        )

    def __str__(self):
        share = self.report.device / self.budget
        lines = [
            f"largest batch: {self.size} (a multiple of {self.multiple}) on {self.report.target}",
            f"{'batch':>10}{'compiled':>14}{'of budget':>12}",
        ]
        for size, count in self.compiled.items():
            lines.append(f"{size:>10}{format_bytes(count):>14}{count / self.budget:>12.1%}")
        lines.append(self.reason)
        if self.size and share < 0.9 and self.exact:
            lines.append("XLA's bytes jump between the two: it lays out the larger one otherwise.")
        return "\n".join(lines)

    __repr__ = __str__


def max_batch_size(
    step: Callable,
    make_args: Callable[[int], tuple],
    *,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
    multiple: int | None = None,
    compilations: int = 6,
) -> BatchSize:
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
        target: the GPU to compile for, present or not; None: the attached device.
        multiple: of which the batch is to be one, its smallest value too; None: of 8 and of the
            number of GPUs of the target.
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
    if budget is None and not chosen.usable_bytes:
        raise JaxmemError(f"The memory of {chosen} is not known; pass a budget=.")
    budget = "100%" if budget is None else budget
    allowed = device_budget(budget, chosen.usable_bytes, chosen.name)
    multiple = (
        math.lcm(family_of(chosen.known).multiple, chosen.count) if multiple is None else multiple
    )
    for name, value, least in (("multiple", multiple, 1), ("compilations", compilations, 2)):
        if not is_count(value, least):
            raise JaxmemError(f"{name}= takes an int of {least} or more; got {value!r}.")
    if not callable(make_args):
        raise JaxmemError(
            "jaxmem.max_batch_size takes make_args, a function of the batch size that returns the "
            f"step's arguments; got {make_args!r}."
        )
    search = _Search(step, make_args, chosen, allowed, multiple)
    search.compile(1, compilations)
    while len(search.reports) < compilations and (count := search.next()):
        search.compile(count, compilations)
    return search.answer()


class _Search:
    """Batches compiled so far, by their number of multiples."""

    def __init__(self, step, make_args, target, budget: int, multiple: int):
        self.step, self.make_args, self.target = step, make_args, target
        self.budget, self.multiple = budget, multiple
        self.reports: dict[int, MemoryReport] = {}
        self.fixed, self.growth = self._line()

    def compile(self, count: int, most: int) -> None:
        batch = count * self.multiple
        report = memory(self.step, *self._args(batch), target=self.target)
        self.reports[count] = report
        verdict = "fits" if report.device <= self.budget else "does not fit"
        print(
            f"jaxmem: compiled batch {batch} for {self.target.name}, {len(self.reports)} of at "
            f"most {most}: {format_bytes(report.device)}, {verdict}",
            file=sys.stderr,
        )

    def next(self) -> int | None:
        """How many multiples to compile next; None: the answer is known."""
        fits, fails = self._bracket()
        if not fits or fails == fits + 1:
            return None
        known = {count: report.device for count, report in self.reports.items()}
        if len(known) == 1:
            known[0] = self.fixed
        high = fails or fits
        low = max(count for count in known if count < high)
        slope = max((known[high] - known[low]) / (high - low), self.growth)
        if not fails and len(known) > 2:  # a stretch that happens to be flat points too far
            slope = max(slope, (known[high] - self.fixed) / high / 2)
        wanted = max(int(low + (self.budget - known[low]) / slope), fits + 1)
        return min(wanted, fails - 1) if fails else wanted

    def answer(self) -> BatchSize:
        fits, fails = self._bracket()
        return BatchSize(
            fits * self.multiple,
            fails and fails * self.multiple,
            self.multiple,
            self.budget,
            {
                count * self.multiple: self.reports[count].device
                for count in sorted(self.reports, reverse=True)
            },
            self.reports[fits or 1],
        )

    def _bracket(self) -> tuple[int, int | None]:
        """The largest that fits (0: none), and the smallest above it that does not."""
        fits = max((n for n, r in self.reports.items() if r.device <= self.budget), default=0)
        fails = [n for n, r in self.reports.items() if r.device > self.budget and n > fits]
        return fits, min(fails, default=None)

    def _args(self, batch: int) -> tuple:
        args = self.make_args(batch)
        if not isinstance(args, tuple | list):
            raise JaxmemError(
                f"make_args({batch}) must return the tuple of the step's arguments; it returned a "
                f"value of type {type(args).__name__}."
            )
        return tuple(args)

    def _line(self) -> tuple[int, float]:
        """Bytes of the arguments on each GPU: those that do not depend on the batch, and what one
        more multiple adds."""
        one, two = (
            [
                math.prod(jnp.shape(leaf)) * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(self._args(times * self.multiple))
                if hasattr(leaf, "dtype")
            ]
            for times in (1, 2)
        )
        growth = sum(two) - sum(one)
        if growth <= 0:
            raise JaxmemError(
                f"make_args returns arguments of the same sizes for batches of {self.multiple} "
                f"and {2 * self.multiple}: no batch can be too large. Give the batch's arrays the "
                "size that it is called with."
            )
        return (sum(one) - growth) // self.target.count, growth / self.target.count


def _holders(report: MemoryReport) -> str:
    """What is largest at the peak, in words."""
    if not report.has_timeline:
        return ""
    top = list(report.by_source.items())[:3]
    named = ", ".join(f"{format_bytes(size)} by {line}" for line, size in top)
    return f"; at the peak {named}"
