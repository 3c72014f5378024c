"""Predicted throughput of training beside what others measured and published.

    python -m benchmarks.speed.published           # all figures, half an hour on two cores
    python -m benchmarks.speed.published vit unet  # those of these families

Each figure of ``published.csv`` whose program can be written in JAX as it ran: ResNet50, BERT, ViT,
a U-Net and GPT-2, on one GPU or data parallel on several, with attention that writes its scores
out. The others there have attention kernels of their own or are sharded in other ways. Optimizer
steps count as often as they ran. The shares of the makers' rates that programs reach
(`jaxmem.targets.AchievableShares`) are fitted to half of the classes of figures (model, GPU and
precision): every other one in alphabetical order. The error is that of predicted seconds beside
measured ones; it holds what differs between frameworks too. What is not fitted, but is known of
GPUs and their libraries (operands come from a cache, convolutions of 3 by 3 need fewer products,
units for matrices read channels last), was put into the model with all figures in view.
"""

import csv
import dataclasses
import functools
import pathlib
import re
import statistics
import sys
import time

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from benchmarks._published import MODELS, OPTIMIZERS
from benchmarks._record import record
from benchmarks._steps import compile_plain
from jaxmem.reports.speed.model import parts_of
from jaxmem.reports.speed.schedule import KernelRun, KernelSchedule
from jaxmem.targets import AchievableShares, known_targets

FIGURES = pathlib.Path(__file__).with_name("published.csv")
FREE = ("matmul", "convolution", "memory", "cache")
STATED = AchievableShares()
WHOLE = AchievableShares(matmul=1.0, convolution=1.0, memory=1.0, cache=1.0, launch=0.0)


def figures() -> list[dict]:
    """Those that can be predicted here."""
    rows = list(csv.DictReader(FIGURES.read_text().splitlines()))
    known = [row for row in rows if row["family"] in MODELS and _is_plain(row)]
    return sorted(known, key=lambda row: (row["family"], row["gpu"], row["precision"], row["id"]))


def _is_plain(row) -> bool:
    # NVIDIA's phase 2 in PyTorch pads sequences to multiples of 64 tokens, in bins ("Binned
    # pretraining for phase2", its changelog of 21.11): how many tokens it computes is not said.
    binned = row["id"].startswith("dle-pt-bert") and row["sequence_or_image"] == "512"
    told = {
        "bert": row["attention"] == "plain" and not binned,
        "gpt2": row["attention"] == "plain" and row["devices"] == "1",
        "resnet50": True,
        "unet": row["sequence_or_image"] == "572x572x1",
        "vit": row["attention"] == "plain",
    }
    return told[row["family"]] and row["gpu"] in known_targets()


def microbatches(row) -> int:
    """How often a device computes gradients for one step of the optimizer."""
    found = re.search(r"(\d+) accumulated", row["note"])
    return int(found[1]) if found else 1


def seconds_measured(row) -> float:
    """Of one microbatch on each device."""
    value, slices = float(row["value"]), microbatches(row)
    if row["unit"] == "ms/step":
        return value / 1e3 / slices
    each = int(row["sequence_or_image"]) if row["unit"] == "tokens/s" else 1
    return int(row["global_batch"]) * each / value / slices


def compiled(row):
    """The gradients of a microbatch, and the optimizer's step where it follows each."""
    count, slices = int(row["devices"]), microbatches(row)
    loss, params, batch = MODELS[row["family"]](row, int(row["global_batch"]) // slices)
    optimizer = OPTIMIZERS[row["family"]]
    target = jaxmem.target(row["gpu"], count=count)
    if count > 1:
        mesh = AbstractMesh((count,), ("data",), axis_types=(AxisType.Auto,))
        placed = {True: PartitionSpec("data"), False: PartitionSpec()}
        params, batch = (
            jax.tree.map(lambda leaf, cut=cut: _on(leaf, mesh, placed[cut]), tree)
            for tree, cut in ((params, False), (batch, True))
        )
        loss = parallel(loss, mesh)
    if slices > 1:
        if count > 1:  # sums of gradients wait for the last microbatch
            return None
        return jaxmem.memory(jax.value_and_grad(loss), params, batch, target=target)

    return compile_plain(loss, optimizer, params, batch, target)


def parallel(loss, mesh):
    """Data parallel as the published programs are: each device has statistics of its own examples,
    and gradients are summed."""

    def of_device(params, batch):
        found = loss(params, batch)
        return jax.tree.map(lambda value: jax.lax.pmean(value, "data"), found)

    specs = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


def _on(leaf, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@dataclasses.dataclass
class Figure:
    """One published figure and its compiled program."""

    row: dict
    hlo: str
    target: jaxmem.Target
    measured: float

    @property
    def kind(self) -> tuple:
        return tuple(self.row[name] for name in ("family", "gpu", "precision"))

    def predicted(self, shares: AchievableShares) -> float:
        target = dataclasses.replace(self.target, shares=shares)
        return sum(one.seconds for one in KernelSchedule(self.hlo, target).ran)

    @functools.cached_property
    def ran(self) -> tuple[KernelRun, ...]:
        """As `AchievableShares` says."""
        return KernelSchedule(self.hlo, self.target).ran

    @functools.cached_property
    def parts(self) -> np.ndarray:
        """Of each kernel how often it runs, and its seconds where all shares are 1: of a matmul, of
        a convolution, of its operands from the cache, of memory, and of what is turned;
        ``float64 [kernels, 6]``."""
        found = []
        whole = dataclasses.replace(self.target, shares=WHOLE)
        for one in self.ran:
            if one.kernel:
                parts, of = parts_of(one.kernel, whole), one.kernel.contraction
                is_convolution = of is not None and of.kind == "convolution"
                by_kind = (0, parts.arithmetic) if is_convolution else (parts.arithmetic, 0)
                found.append((one.times, *by_kind, parts.feeding, parts.traffic, parts.turning))
        return np.array(found)

    def quickly(self, shares: AchievableShares) -> float:
        """`predicted`, but for what is waited for, which does not depend on what is fitted."""
        times, matmul, convolution, cache, memory, turned = self.parts.T
        arithmetic = matmul / shares.matmul + convolution / shares.convolution
        arithmetic += cache / shares.cache
        moved = np.maximum(arithmetic, memory / shares.memory) + turned / shares.memory
        return float(np.sum(times * (moved + shares.launch))) + self.waiting

    @functools.cached_property
    def waiting(self) -> float:
        return sum(one.seconds for one in self.ran if one.kernel is None)


def fitted(known: list[Figure]) -> AchievableShares:
    """The shares with the least mean of absolute logarithms of predicted over measured, to 0.01."""

    def loss(values: dict[str, float]) -> float:
        shares = dataclasses.replace(STATED, **values)
        return statistics.fmean(abs(np.log(one.quickly(shares) / one.measured)) for one in known)

    best = {name: getattr(STATED, name) for name in FREE}
    for step in (0.1, 0.03, 0.01):
        better = True
        while better:
            better = False
            for name in FREE:
                for change in (-step, step):
                    value = round(min(max(best[name] + change, 0.05), 1.0), 2)
                    tried = best | {name: value}
                    if loss(tried) < loss(best) - 1e-9:
                        best, better = tried, True
    return dataclasses.replace(STATED, **best)


def summary(errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
    bias = statistics.median(errors)
    return (
        f"{len(sizes)} figures: median error {statistics.median(sizes):.0%}, 90th percentile "
        f"{ninth:.0%}, median of signed ones {bias:+.0%}"
    )


def errors_by_gpu(rows: list[dict]) -> dict[str, float]:
    """The median error of each GPU's figures, to 0.01: of those that are held out, where they are
    five or more, else of all (`Target.time_error`)."""
    found = {}
    for gpu in sorted({row["GPU"].split()[-1] for row in rows}):
        own = [row for row in rows if row["GPU"].split()[-1] == gpu]
        apart = [row for row in own if row["set"] == "held out"]
        used = apart if len(apart) >= 5 else own
        found[gpu] = round(statistics.median(abs(int(row["error"][:-1])) for row in used) / 100, 2)
    return found


def main():
    wanted = sys.argv[1:] or list(MODELS)
    known = []
    for row in figures():
        if row["family"] in wanted:
            began = time.perf_counter()
            report = compiled(row)
            if report is not None:
                known.append(Figure(row, report.hlo, report.target, seconds_measured(row)))
            print(row["id"], f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    kinds = sorted({one.kind for one in known})
    tuned = set(kinds[::2])
    shares = fitted([one for one in known if one.kind in tuned])
    rows = []
    errors: dict[str, list[float]] = {"held out": [], "fitted": []}
    for one in known:
        predicted, part = one.predicted(shares), "fitted" if one.kind in tuned else "held out"
        error = predicted / one.measured - 1
        errors[part].append(error)
        row = one.row
        rows.append(
            {
                "figure": row["id"],
                "GPU": f"{row['devices']} x {row['gpu']}",
                "precision": row["precision"],
                "batch": int(row["global_batch"]) // microbatches(row),
                "measured ms": round(1e3 * one.measured, 1),
                "jaxmem ms": round(1e3 * predicted, 1),
                "error": f"{error:+.0%}",
                "set": part,
                "source": row["source_title"],
            }
        )
    found = ", ".join(f"{name} {getattr(shares, name):.2f}" for name in FREE)
    note = f"Shares: {found}. " + "; ".join(
        f"{name}: {summary(part)}" for name, part in errors.items() if part
    )
    by_gpu = ", ".join(f"{name} {error:.0%}" for name, error in errors_by_gpu(rows).items())
    note += f". Median errors by GPU: {by_gpu}"
    record("Predicted throughput beside published figures", rows, note + ".")
    print(note)


if __name__ == "__main__":
    main()
