"""ResNet50's whole training step, 224x224, batch 200, in float32, bfloat16 and float16, on an H200.

"by dtype" gives the Flax model its own ``dtype``; "autocast" leaves the float32 model as it is and
casts it by operation.
"""

import jax.numpy as jnp

import jaxmem
from benchmarks._models import example
from benchmarks._record import record

plan_step = example("resnet50", "train").plan_step

FP16 = {"precision": "fp16", "loss_scale": jaxmem.LossScale()}
CASES = {
    "fp32": {},
    "bf16 by dtype": {"precision": "bf16", "dtype": jnp.bfloat16},
    "bf16 by autocast": {"precision": "bf16"},
    "fp16 and loss scale by dtype": {"dtype": jnp.float16, **FP16},
    "fp16 and loss scale by autocast": FP16,
}


def main():
    rows, plain = [], None
    for name, levers in CASES.items():
        step, args = plan_step(200, **levers)
        report = jaxmem.memory(step, *args, target="h200", timeline=False)
        plain = plain or report.device
        rows.append(
            {
                "step": name,
                "device": jaxmem.format_bytes(report.device),
                "against fp32": f"{report.device / plain:.3f}x",
                "FLOPs": f"{report.work.flops:.4e}",
            }
        )
        print(rows[-1], flush=True)
    record("ResNet50 in low precision: compiled bytes of the whole training step", rows)


if __name__ == "__main__":
    main()
