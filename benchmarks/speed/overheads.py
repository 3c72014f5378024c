"""What jaxmem's own work takes on ResNet50's training step, batch 200, beside XLA's compilation.

CPU seconds of this process; the compilation (in a worker process) by the clock, not from the cache.
"""

import dataclasses
import time

import jax

import jaxmem
from benchmarks._models import example
from benchmarks._record import record

plan_step = example("resnet50", "train").plan_step


def seconds(work, clock=time.process_time):
    """Of the second call: the first one imports."""
    for _ in range(2):
        began = clock()
        result = work()
        taken = clock() - began
    return taken, result


def main():
    step, args = plan_step(200)
    state, batch = args
    loss_args = (state.params, batch, state.model_state)
    rows = []

    def row(what, taken):
        rows.append({"what": what, "seconds": f"{taken:.2f}"})
        print(rows[-1], flush=True)

    row("trace the plain step", seconds(lambda: plan_step(200)[0].trace(*args))[0])
    taken, plan = seconds(
        lambda: jaxmem.plan(
            step.loss, *loss_args, budget="7GiB", target="h200", compilations=0
        )
    )  # fmt: skip
    row("plan its loss within 7 GiB (trace included)", taken)

    def planned():
        return plan_step(200, remat=plan.apply)[0]

    row("trace the planned step", seconds(lambda: planned().trace(*args))[0])
    lowered = seconds(lambda: planned().trace(*args).lower(lowering_platforms=("cuda",)))[0]
    row("trace and lower it", lowered)

    def compile_anew():
        # Another description is another target: nothing of it is in the cache.
        target = dataclasses.replace(jaxmem.target("h200"), description=f"at {time.time()}")
        return jaxmem.memory(planned(), *args, target=target)

    row("compile it for an H200 (by the clock)", seconds(compile_anew, time.monotonic)[0])
    record("Overheads on ResNet50's training step", rows, __doc__.split("\n\n")[1].strip())


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
