"""Checkpointed loops beside Equinox's and diffrax's, with as many states.

Equinox: its `while_loop(kind="checkpointed")`. diffrax: `diffeqsolve` with Tsit5, fixed steps and
`RecursiveCheckpointAdjoint`, whose state holds more than the solution. The columns "scan" and
"while_loop", both ours, and "theirs" count evaluations of the loop's body in one gradient (of the
equation's right-hand side beside diffrax), by a callback on the CPU: of 1,000 steps, and of 500
beside diffrax. Bytes are compiled: of the 2-D wave equation of `planner.loops` (7,343 steps) for an
RTX 4090, and of its neural ODE for an H100. diffrax is in no group of dependencies: `pip install
diffrax` first.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks._record import record
from benchmarks.planner.loops import SIZE, STEPS, propagated, tsit5
from jaxmem.loops import Schedule, checkpointed_scan, checkpointed_while

COUNTED, SOLVED = 1000, 500


def counted():
    """What a function of a scalar ran, and the function."""
    ran = []

    def count(x):
        ran.append(1)
        return np.ones((), x.dtype)

    def step(x):
        still = jax.lax.stop_gradient(x)
        one = jax.pure_callback(count, jax.ShapeDtypeStruct((), x.dtype), still)
        return jnp.sin(x) * jax.lax.stop_gradient(one)

    return ran, step


def runs(make) -> int:
    ran, step = counted()
    jax.block_until_ready(jax.jit(jax.grad(make(step)))(jnp.float32(0.5)))
    return len(ran)


def scanned(step, states, length):
    """``step(constants, x)`` so often, with so many states."""
    schedule = Schedule(length, length, 1, states)

    def run(constants, x):
        def body(constants, carry, slices):
            return [step(constants, carry[0])], []

        return checkpointed_scan(body, list(constants), [x], [], schedule)[0][0]

    return run


def online(step, states):
    return lambda x: checkpointed_while(
        lambda constants, carry: carry[1] < COUNTED,
        lambda constants, carry, slices: ([step(carry[0]), carry[1] + 1], []),
        ([], []), [x, jnp.int32(0)], states,
    )[0]  # fmt: skip


def by_equinox(step, states):
    from equinox.internal import while_loop

    return lambda x: while_loop(
        lambda carry: carry[1] < COUNTED,
        lambda carry: (step(carry[0]), carry[1] + 1),
        (x, jnp.int32(0)), kind="checkpointed", checkpoints=states, max_steps=COUNTED,
    )[0]  # fmt: skip


def by_diffrax(field, states):
    """The equation with right-hand side ``field(constants, y)``."""
    import diffrax

    def run(constants, y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, constants: field(constants, y)), diffrax.Tsit5(),
            0.0, 0.01 * SOLVED, 0.01, y, args=constants, max_steps=SOLVED,
            adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=states),
        )  # fmt: skip
        return solution.ys[-1]

    return run


def compiled(loss, shapes, target) -> str:
    arrays = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes, is_leaf=lambda one: isinstance(one, tuple) and isinstance(one[0], int),
    )  # fmt: skip
    report = jaxmem.memory(jax.grad(loss), *arrays, target=target, timeline=False)
    return jaxmem.format_bytes(report.device)


def wave(states, by=""):
    def loss(medium, source):
        zeros = jnp.zeros((SIZE, SIZE), jnp.float32)
        if by:
            from equinox.internal import while_loop

            def body(carry):
                *state, at = carry
                return *propagated(medium, state, source[at])[0], at + 1

            u, *_ = while_loop(
                lambda carry: carry[2] < STEPS, body, (zeros, zeros, jnp.int32(0)),
                kind="checkpointed", checkpoints=states, max_steps=STEPS,
            )  # fmt: skip
        else:

            def step(constants, carry, slices):
                return list(propagated(constants[0], carry, slices[0])[0]), []

            schedule = Schedule(STEPS, STEPS, 1, states)
            (u, _), _ = checkpointed_scan(step, [medium], [zeros, zeros], [source], schedule)
        return jnp.sum(u**2)

    return compiled(loss, [(SIZE, SIZE), (STEPS,)], "rtx-4090")


def network(parameters, y):
    first, second = parameters
    return jnp.tanh(y @ first) @ second


def steps_of(field):
    return lambda constants, y: tsit5(lambda y: field(constants, y), y)


def ode(run):
    def loss(parameters, y):
        return jnp.sum(run(parameters, y) ** 2)

    return compiled(loss, [[(512, 512), (512, 512)], (4096, 512)], "h100")


def of_equinox(states) -> dict:
    return {
        "beside": "Equinox",
        "states": states,
        "scan": runs(lambda step: lambda x: scanned(lambda _, y: step(y), states, COUNTED)([], x)),
        "while_loop": runs(lambda step: online(step, states)),
        "theirs": runs(lambda step: by_equinox(step, states)),
        "scan bytes": wave(states),
        "their bytes": wave(states, "equinox"),
    }


def of_diffrax(states) -> dict:
    def ours(field):
        return scanned(steps_of(field), states, SOLVED)

    def theirs(field):
        return by_diffrax(field, states)

    return {
        "beside": "diffrax",
        "states": states,
        "scan": runs(lambda step: lambda x: ours(lambda _, y: step(y))([], x)),
        "while_loop": "",
        "theirs": runs(lambda step: lambda x: theirs(lambda _, y: step(y))([], x)),
        "scan bytes": ode(ours(network)),
        "their bytes": ode(theirs(network)),
    }


def main():
    rows = [of(states) for of in (of_equinox, of_diffrax) for states in (64, 34, 12)]
    record("Checkpointed loops beside Equinox's and diffrax's", rows, __doc__.partition("\n\n")[2])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
