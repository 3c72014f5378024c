"""Predicted times of collectives beside those that others measured.

    python -m benchmarks.speed.collectives

``collectives.csv`` has tables of nccl-tests that others published, each with its source. Compared
are those of GPUs that are linked as `jaxmem.target` has them, on one node, or on several with the
network that is told (InfiniBand or RoCE: transports of some clouds start ten times later). Three
numbers are free: the shares of links and of the network that are reached, and what pieces cost that
wait for each other. They are fitted to every other table in the order of their sources.
"""

import csv
import dataclasses
import itertools
import pathlib
import re

import numpy as np

import jaxmem
from benchmarks._record import record
from jaxmem.targets import AchievableShares
from jaxmem.targets.cuda import nccl
from jaxmem.targets.links import Group

FIGURES = pathlib.Path(__file__).with_name("collectives.csv")
LINKS = {"nvswitch": "NVLink", "nvlink": "NVLink", "pcie": "PCIe"}
TABLE = ("source", "gpu", "link", "gpus", "nodes", "network", "kind")
SHARES = np.arange(0.7, 1.001, 0.02)
FILLINGS = np.arange(0, 2.001, 0.25)
SMALL = 2**20  # bytes; of fewer the start is what counts


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of a table."""

    row: dict

    @property
    def table(self) -> tuple:
        return tuple(self.row[name] for name in TABLE)

    @property
    def size(self) -> int:
        return int(self.row["bytes"])

    def error(self, link: float, network: float, filling: float) -> float:
        """The predicted time over the measured one, less one."""
        row, target = self.row, jaxmem.target(self.row["gpu"])
        count, nodes = int(row["gpus"]), int(row["nodes"])
        links = target.links
        if nodes > 1:
            together = np.prod([int(number) for number in _network(row["network"])]) * 1e9 / 8
            links = dataclasses.replace(links, network=together / (count // nodes))
        if row["link"] != "nvswitch":
            links = dataclasses.replace(links, sums=0.0)
        shares = AchievableShares(link=link, network=network)
        kind = {"send-recv": "collective-permute"}.get(row["kind"], row["kind"])
        seconds = nccl.seconds(
            kind, self.size, Group(count, count // nodes), links.reached(shares), filling
        )
        return seconds * 1e6 / float(row["microseconds"]) - 1


def figures() -> list[Figure]:
    """Those that can be compared."""
    rows = csv.DictReader(FIGURES.read_text().splitlines())
    return [Figure(row) for row in rows if _is_compared(row)]


def _is_compared(row) -> bool:
    linked = LINKS.get(row["link"]) == jaxmem.target(row["gpu"]).links.kind
    network = row["network"]
    told = not network or bool(re.search("InfiniBand|RoCE", network) and _network(network))
    return row["doubtful"] == "no" and int(row["bytes"]) > 0 and linked and told


def _network(text: str) -> tuple[str, ...]:
    """Cards of a node, and their Gbit/s."""
    found = re.match(r"(\d+)x(\d+) Gb/s", text)
    return found.groups() if found else ()


def fitted(chosen: list[Figure]) -> tuple[float, float, float]:
    """The three free numbers, by the least sum of how far logarithms are apart."""

    def apart(free) -> float:
        return sum(abs(np.log1p(one.error(*free))) for one in chosen)

    link, network, filling = min(itertools.product(SHARES, SHARES, FILLINGS), key=apart)
    return float(link), float(network), float(filling)


def main():
    found = figures()
    tables = sorted({one.table for one in found})
    known = set(tables[::2])
    free = fitted([one for one in found if one.table in known])
    shares = jaxmem.target("h100").shares
    print(f"fitted: link {free[0]:.2f}, network {free[1]:.2f}, filling {free[2]:.2f}", flush=True)
    print(f"stated: link {shares.link}, network {shares.network}, filling {nccl.FILLING}")
    stated = shares.link, shares.network, nccl.FILLING
    rows = []
    for number, table in enumerate(tables):
        errors = {one.size: one.error(*stated) for one in found if one.table == table}
        source, gpu, link, count, nodes, network, kind = table
        rows.append(
            {
                "GPU": gpu,
                "GPUs": int(count),
                "nodes": int(nodes),
                "links": ", ".join(filter(None, (link, network))),
                "collective": kind,
                "below 1 MiB": _median(errors[size] for size in errors if size < SMALL),
                "from 1 MiB": _median(errors[size] for size in errors if size >= SMALL),
                "half": "held out" if number % 2 else "fitted",
                "source": source,
            }
        )
    held = [one for one in found if one.table not in known]
    said = []
    for least in (0, SMALL):
        errors = [abs(one.error(*stated)) for one in held if one.size >= least]
        said.append(f"{np.median(errors):.0%}, nine of ten within {np.quantile(errors, 0.9):.0%}")
    note = (
        f"{len(found)} times of {len(tables)} tables. Median error of those held out: {said[0]}; "
        f"from 1 MiB on: {said[1]}. Worst are devices without peer-to-peer copies, whose bytes "
        "pass the host. In the table: the median of predicted times over measured ones. Fitted: "
        f"{free[0]:.2f} of links, {free[1]:.2f} of the network, {free[2]:.2f} for pieces."
    )
    record("Predicted times of collectives beside published ones", rows, note)


def _median(errors) -> str:
    found = list(errors)
    return f"{np.median(found):+.0%}" if found else ""


if __name__ == "__main__":
    main()
