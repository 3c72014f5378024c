"""ResNet50 at 224x224, fp32, SGD with momentum, batch 200: the dp planner at falling budgets.

Every plan is made for the loss (`jaxmem.plan`, the momentum reserved), and the bytes and FLOPs
printed are those of the whole training step with that plan, compiled for an H200 with XLA's own
rematerialization pass off.
"""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._models import example
from benchmarks._record import record
from jaxmem.targets.cuda.family import Cuda

MODEL = example("resnet50")

GIB = 2**30
BUDGETS = [10.25, 8.4, 7.5, 6.65, 5.35, 5.0, 4.0]
OPTIONS = dict(Cuda.compiler_options)  # as in Plan.compiler_options
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def workload(batch: int, dtype=None):
    """The loss of ResNet50 as a function of (params, batch_stats, batch), and its arguments."""
    net = MODEL.ResNet(dtype=dtype)
    loss_fn = MODEL.make_loss(net)

    def loss(params, batch_stats, batch):
        value, new, metrics = loss_fn(params, batch, model_state=batch_stats)
        return value, (new, metrics)

    image = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)
    variables = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), image)
    return loss, (variables["params"], variables["batch_stats"], {"image": image, "label": label})


def whole_step(loss, plan, args, target):
    """The report of one whole training step with a plan (None: the plain one)."""
    planned = plan.apply(loss) if plan else loss

    def step(params, batch_stats, opt_state, batch):
        (value, (new, _)), gradient = jax.value_and_grad(planned, has_aux=True)(
            params, batch_stats, batch
        )
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), new, opt_state, value

    params, batch_stats, batch = args
    opt_state = jax.eval_shape(OPTIMIZER.init, params)
    return jaxmem.memory(
        jax.jit(step, donate_argnums=(0, 1, 2)),
        params, batch_stats, opt_state, batch,
        target=target,
        compiler_options=OPTIONS,
        timeline=False,
    )  # fmt: skip


def main():
    loss, args = workload(200)
    momentum = sum(leaf.size * 4 for leaf in jax.tree.leaves(args[0]))
    plain = whole_step(loss, None, args, "h200")
    rows = [row("no remat", None, plain, plain)]
    for budget in [*BUDGETS, 0.5]:
        try:
            plan = jaxmem.plan(
                loss, *args, budget=int(budget * GIB), target="h200", reserved=momentum,
                has_aux=True,
            )  # fmt: skip
        except jaxmem.BudgetError as error:
            lowest = error.lowest
            plan = jaxmem.plan(
                loss, *args, budget=lowest, target="h200", reserved=momentum, has_aux=True
            )
            budget = lowest / GIB
        rows.append(row(f"{budget:.2f} GiB", plan, whole_step(loss, plan, args, "h200"), plain))
        print(rows[-1], flush=True)
    record("ResNet50: the dp planner at falling budgets", rows, __doc__.split("\n\n")[1])


def row(name, plan, report, plain):
    return {
        "budget": name,
        "whole step": jaxmem.format_bytes(report.device),
        "FLOPs": f"{report.work.flops / plain.work.flops:.3f}x",
        "convolutions": report.work.convolutions,
        "projected": jaxmem.format_bytes(plan.projected_bytes) if plan else "",
        "compiled": jaxmem.format_bytes(plan.compiled_bytes) if plan else "",
        "predicted extra ms": f"{plan.predicted.recompute_seconds * 1e3:.1f}" if plan else "0",
    }


if __name__ == "__main__":
    main()
