"""The phases of a training step with swish, plain and memory-efficient, compiled for an H200.

The experiment of the article that made memory-efficient Swish known (C. Shine, "More
Memory-Efficient Swish Activation Function", 2019), for JAX: a fully connected network (here 12
layers of width 2048, fp32, SGD), batch 128 and 512. Data: parameters and batch; the others: the
most live bytes while that phase runs; step: the whole. `custom_vjp` is the article's function: it
keeps its input and computes the rest again.
"""

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._record import record

LAYERS, WIDTH = 12, 2048
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options
PHASES = ("forward", "loss", "backward")


@jax.custom_vjp
def efficient_swish(x):
    return x * jax.nn.sigmoid(x)


def _backward(x, given):
    share = jax.nn.sigmoid(x)
    return (given * share * (1 + x * (1 - share)),)


efficient_swish.defvjp(lambda x: (efficient_swish(x), x), _backward)


def network(swish):
    def loss(params, batch):
        x, wanted = batch
        with jax.named_scope("network"):
            for w in params:
                x = swish(x @ w)
        return jnp.square(x - wanted).mean()

    return loss


def training(loss):
    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return jax.jit(step, donate_argnums=0)


def main():
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    rows = []
    for size in (128, 512, 8192):
        data = jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)
        args = params, (data, data)
        plain = network(lambda x: x * jax.nn.sigmoid(x))
        plans = jaxmem.pareto(plain, *args, target="h200", points=20).plans
        plan = [plan for plan in plans if not plan.predicted.recompute_flops][-1]
        forms = {
            "plain": plain,
            "custom_vjp": network(efficient_swish),
            "plan": plan.apply(plain),
        }
        for name, loss in forms.items():
            report = jaxmem.memory(training(loss), *args, target="h200", compiler_options=OPTIONS)
            most = dict.fromkeys(PHASES, 0)
            for phase, live in zip(report.phases, report.timeline.live.tolist(), strict=True):
                phase = "backward" if phase == "recompute" else phase
                if phase in PHASES:  # the update is fused into the backward pass
                    most[phase] = max(most[phase], live)
            row = {"batch": size, "swish": name, "data": f"{report.argument / 2**20:.1f} MiB"}
            row |= {phase: f"{live / 2**20:.1f} MiB" for phase, live in most.items()}
            row["step"] = f"{report.device / 2**20:.1f} MiB"
            rows.append(row)
            print(row, flush=True)
    record("Memory-efficient Swish, phase by phase", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
