"""Memory against recomputation: jaxmem's plans and every one-liner policy on six networks.

    python -m benchmarks.planner.frontiers                 # all of them, hours on two cores
    python -m benchmarks.planner.frontiers U-Net ResNet50  # these rows; the others stay

Value and gradient of the loss, compiled for an H200 with XLA's own rematerialization pass off.
ResNet50 200 x 224^2, U-Net 16 x 256^2, DenseNet-121 64 x 224^2, EfficientNet-B0 128 x 224^2 and
ViT-B/16 64 x 224^2 in fp32, GPT-2 medium 8 x 1024 in bf16. A policy is that of `jax.checkpoint` on
every block of the model. jaxmem's plans are for the bytes of each policy, for shares of the plain
step's, and for the least that it can reach. FLOPs are those of matmuls and convolutions in the
optimised HLO, beside the plain step's; "projected" bytes and the predicted time of recomputation
are jaxmem's own arithmetic.
"""

import time

import flax.linen as nn
import jax

import jaxmem
from benchmarks._models import (
    DenseLayer,
    DenseNet,
    EfficientNet,
    Encoder,
    Inverted,
    ViT,
    classifier,
    example,
    resnet50,
    unet,
)
from benchmarks._record import record_parts
from benchmarks.planner.planner_gpt import workload as gpt2_medium
from jaxmem.targets.cuda.family import Cuda

GIB = 2**30
TARGET = "h200"
OPTIONS = dict(Cuda.compiler_options)  # as in Plan.compiler_options
SHARES = (0.8, 0.6, 0.4)
COMPILATIONS = 3  # for each plan; what is compiled is kept on disk, so a second run is quick
known = jax.checkpoint_policies
POLICIES = {
    "nothing_saveable": known.nothing_saveable,
    "dots_with_no_batch_dims_saveable": known.dots_with_no_batch_dims_saveable,
    "dots_saveable": known.dots_saveable,
    "jaxmem.remat_policy()": jaxmem.remat_policy(target=TARGET),
}


def flax(make, block, **options):
    """A network whose blocks are as they are, or under a policy."""

    def workload(policy=None):
        return make(block=nn.remat(block, policy=policy, **options)) if policy else make()

    return workload


NETWORKS = {
    "ResNet50": flax(
        lambda **changes: resnet50(200, **changes),
        example("resnet50").Block,
        static_argnums=(2,),
    ),
    "GPT-2 medium": lambda policy=None: gpt2_medium("unrolled", policy),
    "ViT-B/16": flax(lambda **changes: classifier(ViT(**changes), 64, 224), Encoder),
    "U-Net": flax(lambda **changes: unet(16, 256, **changes), example("unet").Double),
    "EfficientNet-B0": flax(
        lambda **changes: classifier(EfficientNet(**changes), 128, 224), Inverted
    ),
    "DenseNet-121": flax(lambda **changes: classifier(DenseNet(**changes), 64, 224), DenseLayer),
}


def compiled(loss, args, target=TARGET, options=OPTIONS):
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    step = jax.jit(jax.value_and_grad(loss, has_aux=has_aux))
    return jaxmem.memory(step, *args, target=target, compiler_options=options)


def planned(loss, args, budget, target=TARGET):
    """The plan within a budget, or the one nearest to it, and whether it is within it."""
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    options = {"target": target, "has_aux": has_aux, "compilations": COMPILATIONS}
    try:
        return jaxmem.plan(loss, *args, budget=budget, **options), True
    except jaxmem.BudgetError as error:
        return jaxmem.plan(loss, *args, budget=error.lowest, **options), False


def rows_of(name):
    """The rows of one network: the plain step, the policies, the plans."""
    workload = NETWORKS[name]
    loss, args = workload()
    plain = compiled(loss, args)
    began = time.monotonic()

    def row(step, device, flops, plan=None):
        found = {
            "network": name,
            "step": step,
            "compiled": f"{device / GIB:.3f} GiB",
            "of plain": f"{device / plain.device:.1%}",
            "FLOPs": f"{flops / plain.work.flops:.3f}x",
            "projected": f"{plan.projected_bytes / GIB:.3f} GiB" if plan else "",
            "predicted time": "",
        }
        if plan:
            more = plan.predicted.recompute_share
            found["predicted time"] = f"{1 + more:.3f}x"
        print(f"{time.monotonic() - began:.0f} s", found, flush=True)
        return found

    yield row("plain", plain.device, plain.work.flops)
    rivals: dict[int, str] = {}  # the first policy of so many bytes
    for policy, function in POLICIES.items():
        report = compiled(*workload(function))
        rivals.setdefault(report.device, policy)
        yield row(f"`{policy}` on every block", report.device, report.work.flops)
    for device, policy in rivals.items():
        plan, fits = planned(loss, args, device)
        if fits:
            yield row(f"jaxmem, as `{policy}`", plan.compiled_bytes, plan.compiled.flops, plan)
    for share in (*SHARES, 0):
        plan, fits = planned(loss, args, max(int(share * plain.device), 1))
        label = f"jaxmem, {share:.0%}" if fits else "jaxmem, floor"
        yield row(label, plan.compiled_bytes, plan.compiled.flops, plan)
        if not fits:
            break


def main():
    title, note = "Memory against recomputation", __doc__.split("\n\n")[2]
    record_parts(title, "network", list(NETWORKS), rows_of, note)


if __name__ == "__main__":
    main()
