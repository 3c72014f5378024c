"""Planner time against program size, and against an exact solver.

CPU seconds of a process for each program; nothing is compiled. "JAX traces" is `jax.make_jaxpr` of
the loss, "trace" its tracing to a program, "plan" the dp planner's search for a plan at half of the
plain peak, "no budget" the one for the fewest bytes at one more forward pass; "memory" is the most
that the process had. The exact solver writes out
every tree of regions over a chain of blocks, with every level of saved values, and keeps the best
time of each peak (tests/test_chain.py); the dp's chain is the planner's own recursion on the same
numbers, and "equal" counts the budgets at which both have the same least time.
"""

import functools
import json
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._models import ViT, classifier, of_tests, resnet50, unet
from benchmarks._record import record
from benchmarks.planner.planner_gpt import workload as gpt2_medium
from jaxmem.planning.chain import Chain, Solution
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.traced import TracedFunction


def chain(layers):
    """Layers of tanh(x @ w)."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * layers
    return loss, (weights, jax.ShapeDtypeStruct((8192, 512), jnp.float32))


def many(layers):
    """Ten operations a layer, with a skip round each."""

    def loss(weights, x):
        for at in range(layers):
            y = x @ weights[at % len(weights)]
            gate = y * jax.nn.sigmoid(y)
            x = x + 0.5 * jnp.tanh(gate + jnp.sin(x) * jnp.cos(y))
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 50
    return loss, (weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32))


PROGRAMS = {
    **{f"{layers} layers of tanh(x w)": (chain, layers) for layers in (8, 32, 128, 512)},
    "U-Net": (unet, 16, 256),
    "ViT-B/16": (lambda: classifier(ViT(), 64, 224),),
    "ResNet50": (resnet50, 200),
    "ResNet152": (functools.partial(resnet50, sizes=(3, 8, 36, 3)), 200),
    "20,000 operations": (many, 2000),
    "GPT-2 medium, scan": (gpt2_medium, "scan"),
    "GPT-2 medium, unrolled": (gpt2_medium, "unrolled"),
}


def taken(work):
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def planned(name) -> dict:
    make, *given = PROGRAMS[name]
    loss, args = make(*given)
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    loss, args = make(*given)  # not traced before, here and below
    by_jax, _ = taken(lambda: jax.make_jaxpr(loss)(*args))
    loss, args = make(*given)

    def trace():
        program = TracedFunction(loss, args, {}, 0, has_aux).program
        return program, len(program.kernels)

    traced, (program, kernels) = taken(trace)
    plain = Constraints.parse(2**62, 0, None, "dp").plan(program).plain_bytes
    allowed = Constraints.parse(plain // 2, 0, "h200", "dp")
    seconds, plan = taken(lambda: allowed.plan(program))
    free = Constraints.parse(None, 0, "h200", "dp")
    free_seconds, least = taken(lambda: free.plan(program))
    results = [
        f"{one.projected_bytes / plain:.1%} of the plain peak, "
        f"{one.predicted.recompute_share:+.1%} time"
        for one in (plan, least)
    ]
    return {
        "program": name,
        "kernels or blocks": kernels,
        "JAX traces": f"{by_jax:.2f} s",
        "trace": f"{traced:.2f} s",
        "plan": f"{seconds:.2f} s",
        "no budget": f"{free_seconds:.2f} s",
        "memory": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB",
        "exact": "",
        "result": "; ".join(results),
    }


def in_its_own_process(name) -> dict:
    command = [sys.executable, "-m", "benchmarks.speed.planner_time", name]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def exact(count: int, chains: int = 10) -> dict:
    test = of_tests("test_chain")
    random = np.random.default_rng(count)
    own = other = 0.0
    equal = budgets = 0
    for _ in range(chains):

        def draw(*shape):
            return random.integers(0, 40, shape)

        again = draw(2, count)
        blocks = Chain(
            again,
            again + draw(2, count),
            1 + draw(2, count),
            draw(2, count),
            draw(2, count, count + 1),
            draw(2, count, count + 1),
        )
        spent, solution = taken(lambda blocks=blocks: Solution(blocks, 40 * count))
        own += spent
        spent, plans = taken(lambda blocks=blocks: test.every_plan(blocks))
        other += spent
        for budget in range(40 * count + 1):
            best = min((t for peak, t in plans.items() if peak <= budget), default=np.inf)
            equal += solution.price(budget) == best
            budgets += 1
    return {
        "program": f"{chains} random chains of {count} blocks, 2 levels",
        "kernels or blocks": count,
        "JAX traces": "",
        "trace": "",
        "plan": f"{own:.2f} s",
        "no budget": "",
        "memory": "",
        "exact": f"{other:.2f} s",
        "result": f"equal at {equal} of {budgets} budgets",
    }


def main():
    rows = []
    for name in PROGRAMS:
        rows.append(in_its_own_process(name))
        print(rows[-1], flush=True)
    for count in (8, 16, 24, 32):
        rows.append(exact(count))
        print(rows[-1], flush=True)
    title = "Planner time against program size, and against an exact solver"
    record(title, rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(planned(sys.argv[1]))) if sys.argv[1:] else main()
