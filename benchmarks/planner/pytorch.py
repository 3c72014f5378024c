"""PyTorch's `activation_memory_budget` and jaxmem on the same ResNet50 and GPT-2 medium.

    pip install torch                      # the CPU build does; for this one benchmark
    python -m benchmarks.planner.pytorch   # all four parts, some 40 minutes on two cores
    python -m benchmarks.planner.pytorch "ResNet50, jaxmem"    # one; the others stay

Value and gradient of the loss: ResNet50 200 x 224^2 in fp32, GPT-2 medium 8 x 1024 in bf16 with
fp32 parameters. PyTorch's rows are read off the graphs of its min-cut partitioner: "saved" is what
crosses from the forward to the backward graph, "peak" is a simulation of the two graphs in order
(no fusion, no allocator). jaxmem's "saved" is JAX's list of residuals, before XLA fuses, and "peak"
is compiled for an H200. FLOPs are those of matmuls and convolutions, each beside its own
plain step's. A budget is PyTorch's share of the saved bytes, or jaxmem's share of the plain peak.
"""

from importlib.metadata import version

import jax

import jaxmem
from benchmarks._gpu import attached
from benchmarks._record import record_parts
from benchmarks.gpu import apart
from benchmarks.planner.frontiers import NETWORKS, SHARES, compiled, planned

BUDGETS = (1.0, 0.8, 0.4, 0.2, 0.1)
GIB = 2**30


def row(part, budget, saved, peak, flops, measured=None):
    peak_there, seconds = measured or (None, None)
    return {
        "part": part,
        "version": version("torch" if part.endswith("PyTorch") else "jax"),
        "budget": budget,
        "saved": f"{saved / GIB:.2f} GiB",
        "peak": f"{peak / GIB:.2f} GiB",
        "FLOPs": f"{flops:.3f}x",
        "measured peak": f"{peak_there / GIB:.2f} GiB" if peak_there else "",
        "measured ms": f"{seconds * 1e3:.1f}" if seconds else "",
    }


def torch_rows(network):
    try:
        from benchmarks import _torch
    except ImportError:
        print(
            "PyTorch is not installed, and its rows are not made: pip install torch (the CPU build "
            "does), for this benchmark alone."
        )
        return
    make = {
        "ResNet50": lambda: _torch.resnet50(200),
        "GPT-2 medium": lambda: _torch.gpt2_medium(8),
    }[network]
    found = _torch.partitioned(make, BUDGETS)
    plain = found[1.0]["flops"]
    for budget, cost in found.items():
        measured = _torch.measured(make, budget) if attached() else None
        flops = cost["flops"] / plain
        yield row(f"{network}, PyTorch", budget, cost["saved"], cost["peak"], flops, measured)


def jaxmem_rows(network):
    loss, args = NETWORKS[network]()
    plain = compiled(loss, args)
    part = f"{network}, jaxmem"

    def saved(fun):
        return jaxmem.residuals(fun, *args).total

    yield row(part, "none", saved(loss), plain.device, 1)
    for share in (*SHARES, 0):
        plan, fits = planned(loss, args, max(int(share * plain.device), 1))
        peak, flops = plan.compiled_bytes, plan.compiled.flops / plain.work.flops
        measured = None
        if attached():
            limited = apart(network, str(share))
            measured = limited["peak"], limited["seconds"]
        budget = share if fits else "floor"
        yield row(part, budget, saved(plan.apply(loss)), peak, flops, measured)
        if not fits:
            break


PARTS = {
    f"{network}, {system}": (rows, network)
    for network in ("ResNet50", "GPT-2 medium")
    for system, rows in (("PyTorch", torch_rows), ("jaxmem", jaxmem_rows))
}


def rows_of(part):
    make, network = PARTS[part]
    return make(network)


def main():
    title = "PyTorch's activation_memory_budget and jaxmem"
    record_parts(title, "part", list(PARTS), rows_of, __doc__.split("\n\n")[2])


if __name__ == "__main__":
    jax.config.update("jax_platforms", None if attached() else "cpu")
    main()
