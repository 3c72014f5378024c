"""PyTorch's `activation_memory_budget` and jaxmem on the same ResNet50 and GPT-2 medium.

    pip install torch                      # the CPU build does; for this one benchmark
    python benchmarks/pytorch.py           # both, some 40 minutes on two cores
    python benchmarks/pytorch.py ResNet50

Value and gradient of the loss: ResNet50 200 x 224^2 in fp32, GPT-2 medium 8 x 1024 in bf16 with
fp32 parameters. PyTorch's rows are read off the graphs of its min-cut partitioner: "saved" is what
crosses from the forward to the backward graph, "peak" is a simulation of the two graphs in order
(no fusion, no allocator). jaxmem's "saved" is JAX's list of residuals, before XLA fuses, and "peak"
is compiled for an H200. FLOPs are those of matmuls and convolutions, each beside its own
plain step's. A budget is PyTorch's share of the saved bytes, or jaxmem's share of the plain peak.
"""

import sys

import jax
from _gpu import attached
from _record import merge, record
from frontiers import NETWORKS, SHARES, compiled, planned
from gpu import apart

import jaxmem

BUDGETS = (1.0, 0.8, 0.4, 0.2, 0.1)
GIB = 2**30


def row(network, system, budget, saved, peak, flops, measured=None):
    peak_there, seconds = measured or (None, None)
    return {
        "network": network,
        "system": system,
        "budget": budget,
        "saved": f"{saved / GIB:.2f} GiB",
        "peak": f"{peak / GIB:.2f} GiB",
        "FLOPs": f"{flops:.3f}x",
        "measured peak": f"{peak_there / GIB:.2f} GiB" if peak_there else "",
        "measured ms": f"{seconds * 1e3:.1f}" if seconds else "",
    }


def torch_rows(network):
    import _torch

    make = {
        "ResNet50": lambda: _torch.resnet50(200),
        "GPT-2 medium": lambda: _torch.gpt2_medium(8),
    }[network]
    found = _torch.partitioned(make, BUDGETS)
    plain = found[1.0]["flops"]
    for budget, cost in found.items():
        measured = _torch.measured(make, budget) if attached() else None
        flops = cost["flops"] / plain
        yield row(network, "PyTorch", f"{budget:g}", cost["saved"], cost["peak"], flops, measured)


def jaxmem_rows(network):
    loss, args = NETWORKS[network]()
    plain = compiled(loss, args)

    def saved(fun):
        return jaxmem.residuals(fun, *args).total

    yield row(network, "JAX", "", saved(loss), plain.device, 1)
    for share in (*SHARES, 0):
        plan, fits = planned(loss, args, max(int(share * plain.device), 1))
        peak, flops = plan.compiled_bytes, plan.compiled_flops / plain.work.flops
        label = f"{share:g}" if fits else "floor"
        measured = None
        if attached():
            there = apart(network, str(share))
            measured = there["peak"], there["seconds"]
        yield row(network, "jaxmem", label, saved(plan.apply(loss)), peak, flops, measured)
        if not fits:
            break


def main():
    try:
        import torch
    except ImportError:
        print(
            "PyTorch is not installed, and nothing is compared: pip install torch (the CPU build "
            "does), for this benchmark alone."
        )
        return
    networks = ["ResNet50", "GPT-2 medium"]
    for network in sys.argv[1:] or networks:
        rows = [*torch_rows(network), *jaxmem_rows(network)]
        note = f"{__doc__.split(chr(10) * 2)[2]} PyTorch {torch.__version__}."
        title = "PyTorch's activation_memory_budget and jaxmem"
        record(title, merge("network", networks, rows), note)


if __name__ == "__main__":
    jax.config.update("jax_platforms", None if attached() else "cpu")
    main()
