"""Plans for TPUs beside the policies of `jax.checkpoint` on every block, at their bytes.

    python -m benchmarks.planner.tpu_policies        # all networks, half an hour on two cores
    python -m benchmarks.planner.tpu_policies U-Net  # these rows; the others stay

Value and gradient of the loss for one v5e, with XLA's own rematerialization pass off and its
scheduler limited to the budget (for the policies: to the chip's memory). For each policy a plan
within its bytes, and for the one of the fewest bytes a plan within 1.05 times those; of ResNet50
one within 1,900 MiB. FLOPs are those of matmuls and convolutions in the optimised HLO, relative to
the plain network's. ResNet50 has 100 images here, GPT-2 medium 8 x 1,024 tokens in bfloat16, ViT
64 images, the U-Net 16 of 256 x 256, EfficientNet 128, DenseNet 64.
"""

import functools

import jax

import jaxmem
from benchmarks._models import GIB, example, resnet50
from benchmarks._record import record_parts
from benchmarks.planner.frontiers import NETWORKS, POLICIES, compiled as compiled_for, flax
from jaxmem.targets.tpu.family import Tpu

TARGET = "v5e"
RESNET = "ResNet50"
LEAST = 1.05
RESNET_BYTES = 1900 * 2**20
COMPILATIONS = 5
WORKLOADS = NETWORKS | {
    RESNET: flax(
        lambda **changes: resnet50(100, **changes), example("resnet50").Block, static_argnums=(2,)
    )
}


compiled = functools.partial(compiled_for, target=TARGET, options=Tpu().planned_options())


def rows_of(name):
    workload = WORKLOADS[name]
    loss, args = workload()
    has_aux = isinstance(jax.eval_shape(loss, *args), tuple)
    plain = compiled(loss, args)

    def row(what, budget, found=None):
        row = {"network": name, "within the bytes of": what, "bytes": f"{budget / GIB:.3f} GiB"}
        row["its FLOPs"] = f"{found.work.flops / plain.work.flops:.3f}x" if found else ""
        options = {"target": TARGET, "has_aux": has_aux, "compilations": COMPILATIONS}
        try:
            plan = jaxmem.plan(loss, *args, budget=budget, **options)
        except jaxmem.BudgetError as error:
            row |= {"plan": f"none; at least {error.lowest / GIB:.3f} GiB", "FLOPs": ""}
        else:
            row["plan"] = f"{plan.compiled_bytes / GIB:.3f} GiB"
            row["FLOPs"] = f"{plan.compiled.flops / plain.work.flops:.3f}x"
        print(row, flush=True)
        return row

    seen = {plain.device}
    reports = {policy: compiled(*workload(function)) for policy, function in POLICIES.items()}
    for policy, report in reports.items():
        if report.device not in seen:
            yield row(f"`{policy}` on every block", report.device, report)
        seen.add(report.device)
    least = min(reports.values(), key=lambda report: report.device)
    yield row(f"{LEAST} times the fewest", int(LEAST * least.device), least)
    if name == RESNET:
        yield row("1,900 MiB", RESNET_BYTES)


def main():
    title, note = "Plans for TPUs beside policies on every block", __doc__.split("\n\n")[2]
    record_parts(title, "network", list(WORKLOADS), rows_of, note)


if __name__ == "__main__":
    main()
