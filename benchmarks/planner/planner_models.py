"""Five networks at half of their plain peak: the dp planner, compiled for an H200.

Value and gradient of the loss, with XLA's own rematerialization pass off; FLOPs are those of
matmuls and convolutions in the optimised HLO, relative to no remat. Batches: U-Net 16 x 256^2,
DenseNet-121 64 x 224^2, EfficientNet-B0 128 x 224^2, ViT-B/16 64 x 224^2, all fp32, and ViT-B/16 in
bf16.
"""

import sys

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._models import GIB, DenseNet, EfficientNet, ViT, classifier, unet
from benchmarks._record import record
from jaxmem.targets.cuda.family import Cuda

CASES = {
    "U-Net": lambda: unet(16, 256),
    "DenseNet-121": lambda: classifier(DenseNet(), 64, 224),
    "EfficientNet-B0": lambda: classifier(EfficientNet(), 128, 224),
    "ViT-B/16": lambda: classifier(ViT(), 64, 224),
    "ViT-B/16, bf16": lambda: classifier(ViT(dtype=jnp.bfloat16), 64, 224),
}
OPTIONS = dict(Cuda.compiler_options)  # as in Plan.compiler_options


def main():
    rows = []
    for name in sys.argv[1:] or CASES:
        loss, args = CASES[name]()
        plain = jaxmem.memory(
            jax.jit(jax.value_and_grad(loss, has_aux=True)),
            *args,
            target="h200",
            compiler_options=OPTIONS,
            timeline=False,
        )
        plan = jaxmem.plan(loss, *args, budget=plain.device // 2, target="h200", has_aux=True)
        rows.append(
            {
                "network": name,
                "plain": f"{plain.device / GIB:.2f} GiB",
                "budget": f"{plain.device / 2 / GIB:.2f} GiB",
                "projected": f"{plan.projected_bytes / GIB:.2f} GiB",
                "compiled": f"{plan.compiled_bytes / GIB:.2f} GiB",
                "FLOPs": f"{plan.compiled.flops / plain.work.flops:.3f}x",
                "predicted extra time": f"{plan.predicted.recompute_share:.1%}",
            }
        )
        print(rows[-1], flush=True)
    record("Five networks at half of their plain peak", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
