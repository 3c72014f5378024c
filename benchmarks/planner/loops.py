"""Long loops within bytes: how often their steps run again, and what XLA makes of it.

A 2-D wave equation (2,048 x 2,048 float32, 7,343 steps, for an RTX 4090) within the bytes of so
many states, an RNN (4,096 steps, width 1,024, batch 64) and a neural ODE (Tsit5 with fixed steps,
500 of them, width 512, batch 4,096, written in plain JAX; both for an H100) at every tenth of what
they take beside arguments and gradients. "Passes" are runs of all steps beside the forward pass
itself; "best" are the fewest that any number of blocks, of states and of steps in a block has
within the same bytes, with the body that the plan chose. "Repeats" are of the step that is run
again most often, and "binomial" what revolve needs with as many states of that size.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._record import record
from jaxmem.loops import Schedule, repeats
from jaxmem.planning import loop_options
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.traced import TracedFunction

SIZE, STEPS = 2048, 7343
STATE = 2 * 4 * SIZE**2


def propagated(medium, carry, value):
    u, before = carry
    neighbours = sum(jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1))
    new = 2 * u - before + medium * (neighbours - 4 * u)
    return (new.at[SIZE // 2, SIZE // 2].add(value), u), new[10]


def wave(run=jax.lax.scan, **options):
    def loss(medium, source):
        zeros = jnp.zeros((SIZE, SIZE), jnp.float32)
        _, seen = run(
            lambda carry, value: propagated(medium, carry, value),
            (zeros, zeros), source, **options,
        )  # fmt: skip
        return jnp.sum(seen**2)

    return loss, [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(SIZE, SIZE), (STEPS,)]]


def rnn():
    def loss(w, u, xs):
        def body(h, x):
            h = jnp.tanh(h @ w + x @ u)
            return h, None

        return jnp.sum(jax.lax.scan(body, jnp.zeros((64, 1024), jnp.float32), xs)[0] ** 2)

    shapes = [(1024, 1024), (1024, 1024), (4096, 64, 1024)]
    return loss, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


# Tsitouras (2011), "Runge-Kutta pairs of order 5(4)".
TSIT5 = [
    [0.161],
    [-0.008480655492356989, 0.335480655492357],
    [2.8971530571054935, -6.359448489975075, 4.3622954328695815],
    [5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525],
    [5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401,
     -0.028269050394068383],
]  # fmt: skip
WEIGHTS = [0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081,
           2.324710524099774]  # fmt: skip


def tsit5(field, y):
    """One step of 0.01."""
    slopes = [field(y)]
    for row in TSIT5:
        at = sum(a * slope for a, slope in zip(row, slopes, strict=True))
        slopes.append(field(y + 0.01 * at))
    return y + 0.01 * sum(b * k for b, k in zip(WEIGHTS, slopes, strict=True))


def ode():
    def loss(parameters, y):
        def field(y):
            first, second = parameters
            return jnp.tanh(y @ first) @ second

        return jnp.sum(jax.lax.scan(lambda y, _: (tsit5(field, y), None), y, None, 500)[0] ** 2)

    shapes = [(512, 512), (4096, 512)]
    one, y = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return loss, [(one, one), y]


def fewest(schedule: Schedule, state: int, step: int) -> int:
    """Evaluations of the best schedule with as many bytes, by trying all states and some blocks."""
    room, length, best = schedule.bytes(state, step), schedule.length, schedule.evaluations
    for states in range(1, min((room - step) // state, length) + 1):
        most = min((room - states * state) // step, length - 1)
        others = {-(-(length - most) // size) for size in range(max(most - 12, 1), most + 1)}
        others |= {-(-(length - most) // most) + more for more in range(12)}
        for count in others:
            block = -(-(length - most) // count)
            found = Schedule(length, count + 1, block, min(states, count + 1))
            if found.tail >= 1:
                best = min(best, found.evaluations)
    return best


def body_of(loop, loss, args, target):
    """Bytes of a state, and of what a step keeps, of the body that a plan has chosen."""
    program = TracedFunction(loss, args, {}, 0).program
    rates = Constraints.parse(None, 0, target, "dp").rates
    for option in loop_options(program, loop.kernel, rates):
        for body in option.bodies:
            if dataclasses.replace(body.loop, schedule=loop.schedule) == loop:
                return body.state, body.residual_bytes
    return None


def row(name, loss, args, target, label, budget, states=None, offload=False) -> dict:
    began = time.process_time()
    jaxmem.plan(loss, *args, budget=budget, target=target, offload=offload, compilations=0)
    seconds = time.process_time() - began
    plan = jaxmem.plan(loss, *args, budget=budget, target=target, offload=offload, compilations=3)
    (loop,) = plan.loops
    schedule, best = loop.schedule, ""
    if schedule and not offload and (kept := body_of(loop, loss, args, target)):
        best = f"{fewest(schedule, *kept) / schedule.length:.3f}"
    return {
        "loop": name,
        "within": label,
        "states": schedule.states if schedule else "",
        "steps in a block": schedule.block if schedule else "",
        "repeats": schedule.repeats if schedule else 0,
        "binomial": repeats(STEPS, states) if states else "",
        "passes": f"{schedule.evaluations / schedule.length:.3f}" if schedule else "0",
        "best": best,
        "recomputed": f"{plan.predicted.recompute_share:.1%}",
        "plain": jaxmem.format_bytes(plan.plain_bytes),
        "budget": jaxmem.format_bytes(plan.budget),
        "projected": jaxmem.format_bytes(plan.projected_bytes),
        "compiled": jaxmem.format_bytes(plan.compiled_bytes),
        "host": jaxmem.format_bytes(plan.predicted.host_bytes) if offload else "",
        "off": f"{plan.compiled_bytes / plan.projected_bytes - 1:+.1%}",
        "planned in": f"{seconds:.2f} s",
    }


def within_states():
    """The wave within the bytes of so many states, beside what one step takes."""
    loss, args = wave()
    try:
        jaxmem.plan(loss, *args, budget="1MiB", target="rtx-4090", compilations=0)
    except jaxmem.BudgetError as error:
        lowest = error.lowest
    for states in (64, 34, 12):
        budget = lowest + (states - 1) * STATE
        yield row("wave", loss, args, "rtx-4090", f"{states} states", budget, states)
    label = "2 GiB, states on the host"
    yield row("wave", loss, args, "rtx-4090", label, 2 * 2**30, offload=True)


def within_tenths(name, loss, args):
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    given = TracedFunction(loss, args, {}, 0).program.boundary_bytes  # arguments and gradients
    for tenth in range(9, 0, -1):
        budget = given + (plain - given) * tenth // 10
        yield row(name, loss, args, "h100", f"{tenth} tenths", budget)


def main():
    rows = [*within_states(), *within_tenths("RNN", *rnn()), *within_tenths("ODE", *ode())]
    record("Long loops within bytes", rows, __doc__.partition("\n\n")[2])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
