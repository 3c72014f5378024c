"""The rules, by the names of primitives. A decorator adds one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxmem.levers.batch.independence.kinds import Kind
from jaxmem.levers.batch.independence.operation import BatchOperation

if TYPE_CHECKING:
    from jaxmem.levers.batch.independence.walk import Walk

Found = Kind | Sequence[Kind]  # of all results alike, or of each


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What an operation makes of examples, of which at least one operand has some.

    Attributes:
        function: it tells the kinds of the results.
        sizes: parameters that may depend on the size of the batch, for the rule checks the shapes
            that come of them; None: all may.
        growing: whether it heeds the growth of operands in which the operation is linear.
        takes_flat: whether an operand may be `FlatPerExample`.
    """

    function: Callable[[BatchOperation], Found]
    sizes: tuple[str, ...] | None = ()
    growing: bool = True
    takes_flat: bool = False


RULES: dict[str, Rule] = {}
# Rules of operations that have programs inside; they walk them.
INSIDE: "dict[str, Callable[[Walk, BatchOperation], list[Kind]]]" = {}


def rule(*names: str, **options: Any) -> Callable:
    """Registers a function of a `BatchOperation`, with the options of a `Rule`."""

    def register(function: Callable[[BatchOperation], Found]) -> Callable:
        RULES.update(dict.fromkeys(names, Rule(function, **options)))
        return function

    return register


def inside(*names: str) -> Callable:
    """Registers a function of a `Walk` and a `BatchOperation` with programs inside."""

    def register(function: Callable) -> Callable:
        INSIDE.update(dict.fromkeys(names, function))
        return function

    return register
