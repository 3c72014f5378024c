"""The one exception family. Every message says what was asked, what was found and what to do."""


class JaxmemError(Exception):
    """Base of every error that jaxmem raises."""


class BudgetError(JaxmemError):
    """A budget that does not parse or that no plan can meet.

    ``lowest`` is the lowest budget found that can be met, in bytes; None: the budget is no budget.
    """

    def __init__(self, message: str, lowest: int | None = None):
        super().__init__(message)
        self.lowest = lowest


class CompileError(JaxmemError):
    """XLA refused a program, ran out of time, or died; carries its last lines."""


class OffloadError(JaxmemError):
    """A value that should be in host memory is not."""


class PlanError(JaxmemError):
    """A plan given to a program it was not made for, or a program that cannot be planned."""


class ResultError(JaxmemError, TypeError):
    """A function returned what is no array: JAX's own error is a `TypeError`."""


class JaxmemWarning(UserWarning):
    """Something works, but not as it was meant to."""
