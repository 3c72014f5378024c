"""The computations of optimised HLO, with the number of turns of every loop that counts.

Not every compiler of XLA's writes how often a loop runs. Else it is read off here: the loop's
condition compares a counter with a limit, its body adds a number to it, and all three are constants
or come from outside as they are.
"""

import functools
import re
from collections.abc import Mapping

from jaxmem.reports.xla.hlo import (
    CALLED,
    CONDITION,
    INDEX,
    TRIPS,
    Lines,
    operands_of,
    operation_of,
    parsed,
)

Named = tuple[str, str]  # a computation, and the name of an instruction in it
Compared = tuple[Named, Named, str]

_CONSTANT = re.compile(r"\bconstant\((-?\d+)\)")
_PLACE = re.compile(r"\bparameter\((\d+)\)")
_DIRECTION = re.compile(r"\bdirection=(\w\w)")
_SAME = frozenset("bitcast convert copy opt-barrier reshape".split())
_TURNED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


@functools.lru_cache(maxsize=1)  # what reads a program asks one after the other
def computations_of(hlo: str) -> Mapping[str, Lines]:
    """Every computation by name, of each the right-hand sides of its instructions by name."""
    found = parsed(hlo)
    counter = _Counter(found)
    for computation, lines in found.items():
        for name, line in lines.items():
            if operation_of(line) == "while" and not TRIPS.search(line):
                turns = counter.turns(computation, line)
                if turns is not None:
                    lines[name] = f'{line}, "known_trip_count":{{"n":"{turns}"}}'
    return found


class _Counter:
    """How often loops run."""

    def __init__(self, computations: Mapping[str, Lines]):
        self.computations = computations
        # Of each body and condition the loop that runs it: the computation that it is in, and it.
        self.loops = {
            called: (computation, line)
            for computation, lines in computations.items()
            for line in lines.values()
            if operation_of(line) == "while"
            for called in (*CALLED.findall(line), *CONDITION.findall(line))
        }

    def turns(self, computation: str, line: str) -> int | None:
        """How often a loop in a computation runs; None: it does not count to a known number."""
        (body,), (condition,) = CALLED.findall(line), CONDITION.findall(line)
        root = self._root(condition)
        compared = self._inside(condition, root, "compare")
        if compared is None:
            return None
        left, right, direction = compared
        if self._element(*left) is None:
            left, right, direction = right, left, _TURNED.get(direction, direction)
        place = self._element(*left)
        if place is None:
            return None
        start = self._given(computation, line, place)
        limit = self.value(*right)
        step = self._step(body, place)
        if start is None or limit is None or not step:
            return None
        if direction in ("LE", "GE"):
            limit += 1 if direction == "LE" else -1
        ends = {"LT": step > 0, "LE": step > 0, "GT": step < 0, "GE": step < 0, "NE": True}
        if not ends.get(direction, False):
            return None
        turns, rest = divmod(limit - start, step)
        if direction == "NE" and (rest or turns < 0):
            return None
        return max(turns + bool(rest), 0)

    def value(self, computation: str, name: str) -> int | None:
        """The number that a scalar is, whatever turn it is; None: not known."""
        lines = self.computations[computation]
        line = lines.get(_original(lines, name), "")
        if operation_of(line) == "constant":
            found = _CONSTANT.search(line)
            return int(found[1]) if found else None
        place = self._element(computation, name)
        if place is None or computation not in self.loops:
            return None
        outer, loop = self.loops[computation]
        (body,) = CALLED.findall(loop)
        # It is what the loop was given where no turn changes it.
        kept = self._returned(body, place)
        if kept is None or self._element(body, kept) != place:
            return None
        return self._given(outer, loop, place)

    def _given(self, computation: str, loop: str, place: int) -> int | None:
        """The number that a loop is given as one element."""
        lines = self.computations[computation]
        given = lines.get(_original(lines, operands_of(loop)[0]), "")
        if operation_of(given) != "tuple":
            return None
        return self.value(computation, operands_of(given)[place])

    def _step(self, body: str, place: int) -> int | None:
        """What a turn adds to an element."""
        name = self._returned(body, place)
        if name is None:
            return None
        for operation, sign in (("add", 1), ("subtract", -1)):
            found = self._inside(body, name, operation)
            if found is None:
                continue
            left, right, _ = found
            if self._element(*left) != place and operation == "add":
                left, right = right, left
            step = self.value(*right)
            if self._element(*left) == place and step is not None:
                return sign * step
        return None

    def _returned(self, body: str, place: int) -> str | None:
        """The name of what a body returns as one element."""
        root = self.computations[body][self._root(body)]
        return operands_of(root)[place] if operation_of(root) == "tuple" else None

    def _inside(self, computation: str, name: str, wanted: str) -> Compared | None:
        """The two operands of an operation, where it or the fusion round it is what a name stands
        for; and the direction of a comparison."""
        lines = self.computations[computation]
        line = lines.get(name, "")
        if operation_of(line) == "get-tuple-element":
            index, source = INDEX.search(line), operands_of(line)[0]
            if index and operation_of(lines.get(source, "")) == "fusion":
                return self._fused(computation, lines[source], int(index[1]), wanted)
        if operation_of(line) == "fusion":
            return self._fused(computation, line, 0, wanted)
        if operation_of(line) != wanted:
            return None
        return _two(line, [(computation, operand) for operand in operands_of(line)])

    def _fused(self, computation: str, fusion: str, place: int, wanted: str) -> Compared | None:
        (called,) = CALLED.findall(fusion)
        inner = self.computations[called]
        line = inner[self._root(called)]
        if operation_of(line) == "tuple":
            line = inner[operands_of(line)[place]]
        if operation_of(line) != wanted:
            return None
        given = operands_of(fusion)
        outside = []
        for name in operands_of(line):
            name = _original(inner, name)
            number = _PLACE.search(inner[name])
            outside.append((computation, given[int(number[1])]) if number else (called, name))
        return _two(line, outside)

    def _element(self, computation: str, name: str) -> int | None:
        """Which element of a computation's one parameter a name stands for."""
        lines = self.computations[computation]
        line = lines.get(_original(lines, name), "")
        if operation_of(line) != "get-tuple-element":
            return None
        index, source = INDEX.search(line), operands_of(line)[0]
        is_parameter = operation_of(lines.get(source, "")) == "parameter"
        return int(index[1]) if index and is_parameter else None

    def _root(self, computation: str) -> str:
        return list(self.computations[computation])[-1]  # a computation ends with its root


def _original(lines: Lines, name: str) -> str:
    """The name of what one has the elements of: past copies and other shapes."""
    while operation_of(lines.get(name, "")) in _SAME:
        name = operands_of(lines[name])[0]
    return name


def _two(line: str, operands: list[Named]) -> Compared | None:
    direction = _DIRECTION.search(line)
    if len(operands) != 2:
        return None
    return operands[0], operands[1], direction[1] if direction else ""
