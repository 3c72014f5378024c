"""What `fit` asks of a lever."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import optax

if TYPE_CHECKING:
    from jaxmem.fitting.costs import Costs
    from jaxmem.fitting.levers.setting import Levers
    from jaxmem.fitting.table import Candidate
    from jaxmem.fitting.workload import Workload


class Lever:
    """One thing that `fit` may turn. To add one: a subclass in a file of its own, and an entry of
    `LEVERS` in ``jaxmem/fitting/levers/__init__.py``.

    Attributes:
        name: of the lever in `Levers`; ``neutral`` is its value where it is not used.
        allowed: names for ``allow=``, and what each permits that changes the mathematics.
        kept: names for ``keep=``, and what each forbids that does not.
        shrinks_state: whether its last value is the one of the fewest bytes of state.
        changes_state: whether the state of a step depends on it.
        changes_loss: whether the loss that is planned depends on it.
        shifts_projection_error: whether projections are off in a way of their own where it is used.
        separate_projection_error: with ``shifts_projection_error``: whether how far they are off at
            one of its values says nothing of another.
        unused_label: what stands in a line of the search where it is not used; empty: nothing.
    """

    name: str
    neutral: Any = False
    allowed: ClassVar[dict[str, str]] = {}
    kept: ClassVar[dict[str, str]] = {}
    shrinks_state = False
    changes_state = True
    changes_loss = False
    shifts_projection_error = False
    separate_projection_error = False
    unused_label = ""

    def as_is(self, workload: "Workload") -> Any:
        """Its value in the step as the user has it."""
        return self.neutral

    def values(self, workload: "Workload") -> list[Any]:
        """The values to search, the one as it is first. What is not searched, and why, goes to
        ``workload.refused``; ``workload.may(name)`` asks for a permission."""
        raise NotImplementedError

    def text(self, value: Any) -> str:
        """A value that is not neutral, in a few words for the table."""
        raise NotImplementedError

    def loss(self, workload: "Workload", loss_fn: Callable, value: Any) -> Callable:
        """The loss of a step with a value that is not neutral; levers wrap it in order."""
        return loss_fn

    def optimizer(
        self, workload: "Workload", optimizer: optax.GradientTransformation, value: Any
    ) -> optax.GradientTransformation:
        """The optimizer of a step with a value that is not neutral; levers wrap it in order."""
        return optimizer

    def options(self, workload: "Workload", value: Any) -> dict[str, Any]:
        """Arguments of `jaxmem.train_step` for a value that is not neutral."""
        return {}

    def reserved_bytes(self, costs: "Costs", levers: "Levers") -> int:
        """What a value that is not neutral adds, on each device, to what is alive beside the loss
        and its gradient."""
        return 0

    def seconds(self, costs: "Costs", levers: "Levers") -> float:
        """What a value that is not neutral adds to a step outside the loss and its gradient."""
        return 0.0

    def brings(self, costs: "Costs", name: str, best: "Candidate | None") -> str:
        """What a permission that was not given would bring to the step that was chosen (None: none
        was), in a clause; empty: nothing is known of that."""
        return ""

    def fastest_loss_value(self, workload: "Workload", value: Any) -> Any:
        """The value of which the loss takes no more time than of this one: `fit` asks how long a
        setting takes at least before it plans it. Asked of levers that change the loss."""
        return value

    def least_seconds(self, costs: "Costs", levers: "Levers", least: "Levers") -> float:
        """Seconds that a forward pass takes more with a value than with its `fastest_loss_value`,
        which is in the setting ``least``."""
        return 0.0


def names_of(levers: dict[str, Lever], which: Callable[[Lever], dict[str, str]]) -> dict[str, str]:
    """The permissions of all levers."""
    return {name: text for lever in levers.values() for name, text in which(lever).items()}
