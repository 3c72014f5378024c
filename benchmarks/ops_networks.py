"""Norm, activation and convolution as one operation in whole networks, and plans, for an H200.

Value and gradient of the loss: EfficientNet-B0, batch 128, bf16; DenseNet-121, batch 64; ResNet50,
batch 200. The operation keeps of each convolution or matmul what the one before it made and the
statistics of the norms (a region each, six to a region, under one); the plan is dp's, with as many
bytes as its budget. FLOPs are those of matmuls and convolutions, relative to plain JAX; no
convolution is done twice where they are 1.000x.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
from _models import GIB, DenseNet, EfficientNet, classifier
from _record import record

import jaxmem
from jaxmem._problem import Problem
from jaxmem.planning import Region

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "resnet50"))
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}  # as in Plan.compiler_options
GROUP = 6


def resnet():
    from train import plan_step

    step, (state, batch) = plan_step(200)
    return step.loss, (state.params, batch, state.model_state)


CASES = {  # and the share of the plain bytes that is asked for
    "EfficientNet-B0": (lambda: classifier(EfficientNet(dtype=jnp.bfloat16), 128, 224), 0.7),
    "DenseNet-121": (lambda: classifier(DenseNet(), 64, 224), 0.56),
    "ResNet50": (resnet, 0.6),
}


def operations(program):
    """Regions that end right after each matmul or convolution, whose results are saved, as are
    statistics; nested twice."""
    kernels = program.kernels
    largest = max(program.sizes[value] for kernel in kernels for value in kernel.results)

    def region(start, stop, inside=()):
        saved = (
            value
            for kernel in kernels[start:stop]
            for value in kernel.results
            if kernel.flops or not kernel.fused or 64 * program.sizes[value] <= largest
        )
        return Region(start, stop, tuple(saved), tuple(inside))

    ends = [index + 1 for index, kernel in enumerate(kernels) if kernel.flops][:-1]
    leaves = [region(*span) for span in zip([0, *ends], ends, strict=False)]
    groups = [leaves[at : at + GROUP] for at in range(0, len(leaves), GROUP)]
    middle = [region(group[0].start, group[-1].stop, group) for group in groups]
    return (region(0, ends[-1], middle),)


def main():
    rows = []
    for name in sys.argv[1:] or CASES:
        make, share = CASES[name]
        loss, args = make()

        def compiled(loss, args=args):
            step = jax.jit(jax.value_and_grad(loss, has_aux=True))
            return jaxmem.memory(step, *args, target="h200", compiler_options=OPTIONS)

        plain = compiled(loss)
        budget = int(share * plain.device)
        plan = jaxmem.plan(loss, *args, budget=budget, target="h200", has_aux=True, compilations=3)
        regions = operations(Problem(loss, args, {}, 0, True).program)
        operation = compiled(dataclasses.replace(plan, regions=regions, loops=()).apply(loss))
        rows.append(
            {
                "network": name,
                "plain": f"{plain.device / GIB:.2f} GiB",
                "asked": f"{budget / GIB:.2f} GiB",
                "plan": f"{plan.compiled_bytes / GIB:.2f} GiB",
                "plan: FLOPs": f"{plan.compiled_flops / plain.work.flops:.3f}x",
                "operation": f"{operation.device / GIB:.2f} GiB",
                "operation: FLOPs": f"{operation.work.flops / plain.work.flops:.3f}x",
            }
        )
        print(rows[-1], flush=True)
    record("Norm, activation and convolution in whole networks", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
