"""What a cheaper derivative of one kind of operation says of itself."""

import abc

import jax

from jaxmem import jaxprs
from jaxmem.program.kernel import Kernel
from jaxmem.targets import Rules


class Derivative(abc.ABC):
    """A derivative that takes less memory than JAX's own. To add one: a subclass in a file of its
    own, and an entry of `DERIVATIVES` in ``jaxmem/program/derivatives/__init__.py``."""

    def cost(self, equation) -> int | None:
        """FLOPs of an operation with this derivative, where they are others than without. 0: it is
        fused into what reads it, costs none worth counting, and is not in memory."""
        return None

    def suits(self, rules: Rules) -> bool:
        """Whether it takes less memory by the rules of a compiler."""
        return True

    @abc.abstractmethod
    def matches(self, step: jaxprs.FlatStep, kernel: Kernel) -> bool:
        """Whether the last operation of a kernel is emitted with this derivative."""

    @abc.abstractmethod
    def emit(self, step: jaxprs.FlatStep, operands: list[jax.Array], alone: bool) -> jax.Array:
        """The result of the operation; ``alone``: nothing else reads its operands. The value and
        the gradient are those of JAX, for every alias of an operand."""
