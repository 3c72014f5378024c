"""Derivatives that take less memory than JAX's own, one a file."""

from jaxmem.program.derivatives.derivative import Derivative as Derivative
from jaxmem.program.derivatives.picking import Picking
from jaxmem.program.derivatives.pooling import Pooling
from jaxmem.program.derivatives.widening import Widening

# The first that matches an operation is emitted.
DERIVATIVES: list[Derivative] = [Picking(), Pooling(), Widening()]
