"""ResNet50's whole training step, fp32, 224x224, SGD with momentum: bytes and FLOPs of each way.

MegEngine's demonstration (batch 100 on an 11 GB RTX 2080 Ti, 200 with sublinear memory) and the
figures of `jaxmem.remat` and `jaxmem.remat_policy`, compiled for GPUs that are not there.
"""

from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn

import jaxmem
from benchmarks._models import example
from benchmarks._record import record

Block = example("resnet50").Block
plan_step = example("resnet50", "train").plan_step

REMAT = nn.remat(Block, static_argnums=(2,))
POLICY = nn.remat(Block, static_argnums=(2,), policy=jaxmem.remat_policy(target="h200"))
NO_PASS = {"xla_disable_hlo_passes": "rematerialization"}
CASES = [
    ("no remat", 100, "rtx-2080-ti", {}, {}),
    ("no remat", 200, "rtx-2080-ti", {}, {}),
    ("no remat, XLA's own pass off", 200, "rtx-2080-ti", {}, NO_PASS),
    ("nn.remat on every block", 200, "rtx-2080-ti", {"block": REMAT}, {}),
    ('jaxmem.remat(loss, planner="sqrt")', 200, "rtx-2080-ti", {"remat": "sqrt"}, {}),
    ("no remat", 200, "h200", {}, {}),
    ("nn.remat(Block, policy=jaxmem.remat_policy())", 200, "h200", {"block": POLICY}, {}),
]


def measure(case):
    _, batch, target, changes, options = case
    step, args = plan_step(batch, **changes)
    report = jaxmem.memory(step, *args, target=target, compiler_options=options, timeline=False)
    return report, report.work


def main():
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(measure, CASES))
    plain = results[1][1].flops / 200
    rows = [
        {
            "step": name,
            "batch": batch,
            "target": target,
            "device": jaxmem.format_bytes(report.device),
            "fits": "yes" if report.fits() else "no",
            "FLOPs": f"{work.flops / batch / plain:.3f}x",
            "convolutions": work.convolutions,
        }
        for (name, batch, target, *_), (report, work) in zip(CASES, results, strict=True)
    ]
    record(
        "ResNet50: compiled bytes of the whole training step",
        rows,
        "FLOPs are those of matmuls and convolutions in the optimised program, per image.",
    )


if __name__ == "__main__":
    main()
