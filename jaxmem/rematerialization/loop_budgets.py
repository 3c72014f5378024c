"""A scan within a byte budget of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import name_of
from jaxmem.ground.errors import BudgetError
from jaxmem.planning import Loop, LoopOption, Rates, Region, loop_options
from jaxmem.program import Program
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.emission import planned_function
from jaxmem.targets import LocalDevice, Target


def scan(
    f: Callable,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
    offload: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` whose derivative takes no more bytes than it is given.

    JAX keeps residuals of every iteration for the backward pass. Here the states of some iterations
    are kept, and the others run again: how many keep everything, at which the state is kept, and
    what is saved inside one iteration are chosen together, for the least time. With ``c`` states
    no iteration runs more than ``r`` times more where there are at most ``C(c + r, c)`` of them,
    the best that there is (treeverse; Griewank and Walther, "Algorithm 799: revolve", ACM TOMS
    2000); where there is room for residuals of several iterations at once, fewer.

    Values and gradients are those of `jax.lax.scan`. The program does not grow with the length.
    Forward mode, second derivatives, `jax.vmap` and `jax.shard_map` work; of second derivatives in
    reverse mode the outer one keeps all. Bytes are those of the arrays that the function sees:
    under `jax.vmap` of one example, under `jax.shard_map` of one device. Where more than the loop
    is to fit, `jaxmem.plan` and `jaxmem.remat` choose the same for the scans of a whole function.

    Args:
        f, init, xs, length, reverse, unroll: as for `jax.lax.scan`; ``unroll`` counts where no
            state is made again.
        budget: device bytes for states, residuals and one iteration's own values in the backward
            pass, beside operands, results and their cotangents. None: as few as take at most one
            forward pass more.
        target: the GPU whose rates decide, and of whose memory a budget in percent is a share.
        offload: whether residuals may wait in host memory.

    Returns:
        The last carry and the stacked results, as `jax.lax.scan`.

    Raises:
        BudgetError: the budget is too small for one state and one iteration; names the lowest.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w):
    ...     def step(x, _):
    ...         return jnp.tanh(w * x), None
    ...     x, _ = jaxmem.scan(step, jnp.ones(1000), length=10_000, budget="400KiB")
    ...     return x.sum()
    >>> jax.grad(loss)(1.0).shape
    ()
    """
    constraints = Constraints.parse(budget, 0, target, "dp", offload)

    def whole(init, xs):
        return jax.lax.scan(f, init, xs, length, reverse, unroll)

    def layout_for(program: Program, _) -> _Layout:
        if not program.scans:
            return _Layout(())  # of no iterations
        option = _chosen(program, constraints.rates, constraints.budget, name_of(f))
        return _Layout((option.loop,) if option.loop else ())

    return planned_function(whole, layout_for)(init, xs)


class _Layout(NamedTuple):
    loops: tuple[Loop, ...]
    regions: tuple[Region, ...] = ()
    widens: bool = False


def _chosen(program: Program, rates: Rates, budget: int | None, name: str) -> LoopOption:
    (kernel,) = program.scans
    options = loop_options(program, kernel, rates)
    if budget is None:
        forward = rates.forward(program)
        return min(
            (option for option in options if option.seconds <= forward),
            key=lambda option: (option.bytes, option.price),
        )
    options += [one for option in options if (one := option.with_room(budget))]
    fitting = [option for option in options if option.bytes <= budget]
    if not fitting:
        lowest = min(option.bytes for option in options)
        operation = program.operation_of(kernel)
        raise BudgetError(
            f"No schedule of this scan ({operation.length} iterations of {name}) fits the budget "
            f"of {format_bytes(budget)}; the lowest one that does is "
            f"{format_bytes(lowest)} ({lowest} bytes projected), with one state kept. Raise the "
            "budget, or make an iteration or its state smaller.",
            lowest,
        )
    return min(fitting, key=lambda option: (option.price, option.bytes))
