"""Loops within a byte budget of their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmem import jaxprs
from jaxmem.frameworks.modules import on_arrays
from jaxmem.ground.bytes import format_against, format_bytes
from jaxmem.ground.checks import check_count, name_of
from jaxmem.ground.errors import BudgetError
from jaxmem.ground.words import pluralize
from jaxmem.loops import checkpointed_while, repeats
from jaxmem.planning import Loop, LoopOption, Rates, Region, Segment, loop_options, simulate_block
from jaxmem.program import Program, read_program
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.emission import planned_function
from jaxmem.targets import LocalDevice, Rules, Target


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
    reverse mode the outer one keeps all, and of a `jaxmem.scan` in another one they are JAX's own
    error. Bytes are those of the arrays that the function sees: under `jax.vmap` of one example,
    under `jax.shard_map` of one device. Where more than the loop is to fit, `jaxmem.plan` and
    `jaxmem.remat` choose the same for the scans of a whole function.

    Args:
        f, init, xs, length, reverse, unroll: as for `jax.lax.scan`; ``unroll`` counts where no
            state is made again.
        budget: device bytes for states, residuals and one iteration's own values in the backward
            pass, beside operands, results and their cotangents. (Results are stacked though nothing
            may read them: return None in the place of those.) None: as few as take at most one
            forward pass more.
        target: the accelerator whose rates decide, and of whose memory a budget in percent is
            a share.
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

    def layout_for(program: Program, _) -> _LoopLayout:
        if not program.scans:
            return _LoopLayout(())  # of no iterations
        option = _chosen(program, constraints.rates, constraints.budget.allowed, name_of(f))
        return _LoopLayout((option.loop,) if option.loop else ())

    return planned_function(whole, layout_for)(init, xs)


class _LoopLayout(NamedTuple):
    loops: tuple[Loop, ...]
    regions: tuple[Region, ...] = ()
    segments: tuple[Segment, ...] = ()
    rules: Rules = Rules()


def _chosen(program: Program, rates: Rates, budget: int | None, name: str) -> LoopOption:
    (kernel,) = program.scans
    options = loop_options(program, kernel, rates)
    if budget is None:
        forward = rates.forward(program)
        return min(
            (option for option in options if option.seconds <= forward),
            key=lambda option: (option.bytes, option.price),
        )
    options += filter(
        None, (option.cheapest_for_bytes(budget) for option in options if option.bodies)
    )
    fitting = [option for option in options if option.bytes <= budget]
    if not fitting:
        lowest = min(option.bytes for option in options)
        operation = program.operation_of(kernel)
        raise BudgetError(
            f"No schedule of this scan ({pluralize(operation.length, 'iteration')} of {name}) fits "
            f"the budget of {format_bytes(budget)}; the lowest found takes "
            f"{format_against(lowest, budget)} ({lowest} bytes projected), with one state kept. "
            "Raise the budget, or make an iteration or its state smaller.",
            lowest,
        )
    return min(fitting, key=lambda option: (option.price, option.bytes))


# States that are kept where nothing says how many. Chosen: of those, a loop of 5,000 steps runs
# each of them at most twice more, one of 170,000 at most three times.
_STATES = 100


def while_loop(
    cond_fun: Callable,
    body_fun: Callable,
    init_val: Any,
    *,
    max_steps: int | None = None,
    budget: int | str | None = None,
    target: str | Target | LocalDevice | None = None,
) -> Any:
    """`jax.lax.while_loop` that can be differentiated in reverse mode, in memory that is bounded
    however often it runs.

    A fixed number of states is kept, chosen while the loop runs (Wang, Moin and Iaccarino, "Minimal
    repetition dynamic checkpointing algorithm for unsteady adjoint calculation", SIAM J. Sci.
    Comput. 2009), and the steps between are run again in the backward pass: with ``c`` states each
    at most ``r`` times while there are at most ``C(c + r, c)`` steps.

    Works under `jax.jit` and `jax.vmap` (the loop then runs until none goes on) and in forward
    mode. A second derivative is JAX's own error if one of the two is in reverse mode.

    Args:
        cond_fun, body_fun, init_val: as for `jax.lax.while_loop`.
        max_steps: where the loop ends though ``cond_fun`` holds.
        budget: device bytes for states and one step's own values in the backward pass. None: 100
            states, or as many as ``max_steps`` needs for at most two runs more of each step.
        target: of whose memory a budget in percent is a share.

    Returns:
        The last value.

    Raises:
        BudgetError: the budget is too small for one state and one step; names the lowest.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def newton(a):
    ...     def better(x):
    ...         return (x + a / x) / 2
    ...     return jaxmem.while_loop(lambda x: jnp.abs(x * x - a) > 1e-5, better, a)
    >>> round(float(jax.grad(newton)(4.0)), 4)
    0.25
    """
    if max_steps is not None:
        check_count("jaxmem.while_loop", "max_steps", max_steps, 0)
    allowed = Constraints.parse(budget, 0, target, "dp").budget.allowed

    def whole(init):
        return jax.lax.while_loop(cond_fun, body_fun, init)

    def evaluate(call, leaves):
        flat = jaxprs.flatten(call, leaves)
        values = dict(enumerate([*flat.consts, *leaves]))
        for step in flat.steps:
            if step.primitive == "while":
                made = _while(step, values, max_steps, allowed, name_of(body_fun))
                values.update(zip(step.outputs, made, strict=True))
            else:
                flat.run([step], values)
        return jax.tree.unflatten(flat.out_tree, [jaxprs.read(values, x) for x in flat.outputs])

    return on_arrays(evaluate, whole, (init_val,), {})


def _while(
    step: jaxprs.FlatStep, values: dict[int, Any], most: int | None, budget: int | None, name: str
) -> list[Any]:
    """The results of a while loop, whose derivative keeps states."""
    loop = jaxprs.loop_of(step.equation)
    body, condition = loop.body, loop.condition
    assert condition is not None
    operands = [jaxprs.read(values, operand) for operand in step.inputs]

    def run(flat: jaxprs.FlatJaxpr, operands) -> list[Any]:
        inner = dict(enumerate(operands))
        flat.run(flat.steps, inner)
        return [jaxprs.read(inner, output) for output in flat.outputs]

    constants = (
        [*condition.consts, *operands[loop.condition_consts]],
        [*body.consts, *operands[loop.body_consts]],
    )
    with jaxprs.context(step):
        return checkpointed_while(
            lambda constants, carry: run(condition, [*constants, *carry])[0],
            lambda constants, carry, _: (run(body, [*constants, *carry]), []),
            constants,
            operands[loop.carry],
            _states(body, loop, most, budget, name),
            most,
        )


def _states(
    body: jaxprs.FlatJaxpr, loop: jaxprs.NestedLoop, most: int | None, budget: int | None, name: str
) -> int:
    """How many states of a while loop to keep."""
    if budget is None:
        states = 1
        while most and states < most and repeats(most, states) > 2:
            states += 1
        return states if most else _STATES
    program = read_program(body)
    first = body.input_count - (loop.carry.stop - loop.carry.start)
    state = max(sum(program.sizes[first : body.input_count]), 1)
    inside = simulate_block(program, 0, len(program.kernels), frozenset()).peak
    states = (budget - inside) // state - 1  # but for the one that the loop is at
    if states < 1:
        lowest = inside + 2 * state
        raise BudgetError(
            f"This while loop of {name} cannot be differentiated within {format_bytes(budget)}; "
            f"the lowest budget that does is {format_against(lowest, budget)} ({lowest} bytes "
            "projected), with one state kept. Raise the budget, or make a step or its state "
            "smaller.",
            lowest,
        )
    return min(states, most or states)
