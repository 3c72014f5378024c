"""Sums over one run of a compiled program: over what it calls, as often as it calls it."""

import functools
from collections.abc import Callable
from typing import Any

from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import Lines, calls_of, entry_of


def sum_over_execution(
    hlo: str,
    own: Callable[[str, Lines], Any],
    zero: Any,
    branch: Callable[[list[Any]], Any],
    unknown: Callable[[Any], Any] = lambda turn: turn,
) -> Any:
    """The sum over all instructions that one run executes.

    Args:
        hlo: the program.
        own: what an instruction adds that calls nothing: of its right-hand side, and of the
            right-hand sides of its computation by name. Such values are added and multiplied by a
            number of turns.
        zero: the sum of none.
        branch: which of the sums of a conditional's branches counts.
        unknown: what a loop adds of which it is not known how often it runs, of what one turn of it
            does; by default that.

    Raises:
        JaxmemError: the text has no entry computation.
    """
    computations = computations_of(hlo)

    @functools.cache
    def total(computation: str) -> Any:
        lines, found = computations[computation], zero
        for line in lines.values():
            calls = calls_of(line)
            if calls is None:
                found = found + own(line, lines)
                continue
            inner = [total(name) for name in calls.computations]
            if calls.is_branch:
                found = found + (branch(inner) if inner else zero)
            else:
                turn = sum(inner, zero)
                found = found + (
                    unknown(turn) if calls.trip_count is None else turn * calls.trip_count
                )
        return found

    return total(entry_of(hlo))
