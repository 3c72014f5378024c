"""One setting of all levers."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmem.fitting.levers.lever import Lever
from jaxmem.ground.errors import JaxmemError

_levers: dict[str, Lever] = {}


def register(*levers: Lever) -> dict[str, Lever]:
    """The registry, by name, with these in it."""
    _levers.update({lever.name: lever for lever in levers})
    return _levers


@dataclasses.dataclass(frozen=True, init=False)
class Levers:
    """What a step is made of beside its plan: a value of each lever, by name or as an attribute.
    Those that are not named are neutral: ``Levers(microbatches=4).host`` is False.

    Raises:
        JaxmemError: there is no such lever.
    """

    values: frozenset[tuple[str, Any]]

    def __init__(self, **values: Any):
        for name in values.keys() - _levers.keys():
            known = ", ".join(map(repr, _levers))
            raise JaxmemError(f"jaxmem.fit has no lever {name!r}; it has {known}.")
        used = {(name, value) for name, value in values.items() if value != _levers[name].neutral}
        object.__setattr__(self, "values", frozenset(used))

    def __getattr__(self, name: str) -> Any:
        if name not in _levers:
            raise AttributeError(name)
        return dict(self.values).get(name, _levers[name].neutral)

    def replace(self, **changes: Any) -> "Levers":
        """The setting with other values of some."""
        return Levers(**{**dict(self.values), **changes})

    def only(self, which: Callable[[Lever], bool]) -> "Levers":
        """The setting with some levers, and the others neutral."""
        return Levers(**{lever.name: value for lever, value in self.used() if which(lever)})

    def used(self) -> list[tuple[Lever, Any]]:
        """The levers whose values are not neutral, with those, in the order of the registry."""
        values = dict(self.values)
        return [(lever, values[name]) for name, lever in _levers.items() if name in values]

    def to_dict(self) -> dict[str, Any]:
        """The value of every lever, by name."""
        return {name: getattr(self, name) for name in _levers}

    @property
    def text(self) -> str:
        """What is used, in words; empty: nothing is."""
        return ", ".join(lever.text(value) for lever, value in self.used())

    def __str__(self):
        used = dict(self.values)
        unused = [lever.unused_label for name, lever in _levers.items() if name not in used]
        return ", ".join(filter(None, [*unused, self.text]))

    __repr__ = __str__
