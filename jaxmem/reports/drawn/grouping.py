"""Equal buffers as one: 64 equal layers are one row, and not 64."""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_NUMBER = re.compile(r"(?<![:\d])\d+")  # not that of a line, as in model.py:12
_Item = TypeVar("_Item")


def group_numbers(keys: Sequence[Hashable]) -> list[int]:
    """For each key the number of its group: equal keys are of one, in the order of their first."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """The items of each key together, in the order of their first ones."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def without_numbers(path: str) -> str:
    """A module path that is the same for layers that differ by their number alone."""
    return _NUMBER.sub("*", path)


def common_path(paths: Sequence[str]) -> str:
    """One path for several that differ by numbers alone: ``*`` stands where these differ.

    >>> common_path(["Net/Block_0/Conv_1", "Net/Block_7/Conv_1"])
    'Net/Block_*/Conv_1'
    """
    found = [_NUMBER.findall(path) for path in paths]
    shown = iter(
        one[0] if all(number == one[0] for number in one) else "*"
        for one in zip(*found, strict=True)
    )
    return _NUMBER.sub(lambda _: next(shown), paths[0])
