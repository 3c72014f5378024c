"""The least that any schedule recomputes within some bytes: a bound, by linear programs.

At the moment when an operation is done for the first time, all that it is made of has been
computed, and nothing that is made of it. What is computed from it later reads values of both kinds:
those that are there at that moment, in no more than the bytes that there are, and those that are
made again. README.md has the proof.
"""

from collections.abc import Iterable, Iterator, Mapping, Set

import numpy as np

from jaxmem.program import Graph, Read

# Moments that are looked at first, evenly spread, and those of which programs are solved. Chosen:
# of the benchmarks' networks twice as many of either raise no bound by 0.1 points.
_CANDIDATE_CUTS = 16
_SOLVED_CUTS = 6
# Of all FLOPs: how far the solver's optimum may be off. Derived: a hundred times its tolerance,
# which is 1e-7.
_TOLERANCE = 1e-5


def least_recomputed(graph: Graph, room: int) -> int:
    """FLOPs that every schedule of a step recomputes if never more than ``room`` bytes of its
    values are there at a time, inputs apart."""
    most = max((cut.least(room) for cut in _cuts(graph)), default=0.0)
    return max(int((most - _TOLERANCE) * graph.flops), 0)


def _cuts(graph: Graph) -> list["_Cut"]:
    """The first runs of operations, those behind which the most work is read: a look at a few of
    them, then ever nearer to the best."""
    readers: dict[int, list[tuple[int, Read]]] = {}
    for number, node in enumerate(graph.nodes):
        for read in node.reads:
            first = read.value if read.initial is None else read.initial
            readers.setdefault(first, []).append((number, read))
    outer = [at for at, node in enumerate(graph.nodes) if node.outer]
    outer = [at for at in outer if graph.nodes[at].flops] or outer
    seen: dict[int, _Cut] = {}

    def evaluate(at: int) -> None:
        if 0 <= at < len(outer) and at not in seen:
            seen[at] = _Cut(graph, outer[at], readers)

    stride = max(len(outer) // _CANDIDATE_CUTS, 1)
    for at in range(0, len(outer), stride):
        evaluate(at)
    ranked = list(seen)
    while stride and seen:
        ranked = sorted(seen, key=lambda at: (-seen[at].work, at))
        evaluate(ranked[0] - stride)
        evaluate(ranked[0] + stride)
        stride //= 2
    ranked = sorted(seen, key=lambda at: (-seen[at].work, at))
    return [seen[at] for at in ranked[:_SOLVED_CUTS]]


def _makers(graph: Graph, reads: Iterable[Read]) -> Iterator[int]:
    for read in reads:
        for value in (read.value, read.initial):
            if value is not None and graph.maker[value] >= 0:
                yield graph.maker[value]


class _Cut:
    """When a node has run for the first time. ``work`` is that of the operations whose results, or
    what is computed of those for nothing, is read later."""

    def __init__(self, graph: Graph, node: int, readers: Mapping[int, list[tuple[int, Read]]]):
        self.graph, self.node = graph, node
        self.later = self._descendants(readers)
        self.work = sum(graph.nodes[number].flops for number in self._read_later())

    def _read_later(self) -> set[int]:
        found: set[int] = set()
        pending = [read for number in self.later for read in self.graph.nodes[number].reads]
        while pending:
            for maker in _makers(self.graph, [pending.pop()]):
                if maker not in self.later and maker not in found:
                    found.add(maker)
                    if not self.graph.nodes[maker].flops:
                        pending.extend(self.graph.nodes[maker].reads)
        return found

    def _descendants(self, readers: Mapping[int, list[tuple[int, Read]]]) -> set[int]:
        """Nodes that are computed from it, in all iterations."""
        graph, node = self.graph, self.node
        handed = {r.value for n in graph.nodes for r in n.reads if r.initial is not None}
        while True:
            found, reached = {node}, set[int]()
            pending = [node]
            while pending:
                for value in graph.nodes[pending.pop()].makes:
                    for number, read in readers.get(value, ()):
                        if read.initial is not None and read.value not in handed:
                            continue
                        if read.initial is not None:
                            reached.add(read.value)
                        if number not in found:
                            found.add(number)
                            pending.append(number)
            # What is handed on has to be made from it too, or later iterations need not be.
            wrong = {value for value in reached if graph.maker[value] not in found}
            if not wrong:
                return found - {node}
            handed -= wrong

    def _ancestors(self) -> set[int]:
        """Nodes that it is computed from, by all iterations, and itself."""
        graph = self.graph
        last = {r.value: r.length for n in graph.nodes for r in n.reads if r.last}
        while True:
            found: set[int] = set()
            ends, handed = set[int](), set[int]()
            pending = [self.node]
            while pending:
                for read in graph.nodes[pending.pop()].reads:
                    value = read.value
                    if read.initial is not None:
                        handed.add(value)
                        value = read.initial
                    if read.last:
                        if value not in last:
                            continue
                        ends.add(value)
                    number = graph.maker[value]
                    if number >= 0 and number not in found:
                        found.add(number)
                        pending.append(number)
            wrong = {value for value in ends - handed if last[value] > 1}
            if not wrong:
                return found | {self.node}
            for value in wrong:
                del last[value]

    def least(self, room: int) -> float:
        """The least share of all FLOPs that is made again; where not even the operands fit, and so
        no schedule does, that of one that keeps nothing."""
        reads = self.graph.nodes[self.node].reads if self.graph.nodes[self.node].flops else ()
        found = self._least(room, reads)
        return self._least(0, ()) or 0.0 if found is None else found

    def _least(self, room: int, operands: tuple[Read, ...]) -> float | None:
        """The optimum of a program; None: there is no solution."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        graph, later, done = self.graph, self.later, self._ancestors()
        wanted = {
            read
            for number in later
            for read in graph.nodes[number].reads
            if any(maker not in later for maker in _makers(graph, [read]))
        }
        made_of = self._made_of([*wanted, *operands])
        recomputed = {number: at for at, number in enumerate(sorted(made_of))}
        values = [value for number in recomputed for value in graph.nodes[number].makes]
        column_of = {value: len(recomputed) + at for at, value in enumerate(values)}
        # What its operands are computed from on the way into it: nothing of FLOPs.
        free = sorted(self._made_of(operands, free=True))
        fused = {number: len(recomputed) + len(column_of) + at for at, number in enumerate(free)}
        total = max(graph.flops, 1)
        cost = np.zeros(len(recomputed) + len(column_of) + len(fused))
        for number, at in recomputed.items():
            if number in done:  # others may be computed now for the first time
                cost[at] = graph.nodes[number].flops / total
        if not cost.any():
            return 0.0
        rows: list[dict[int, float]] = []
        limits: list[float] = []

        def needs(read: Read, by: int | None, run: Mapping[int, int]) -> None:
            """A row: what is read is there, or made again, in as many iterations as it is read."""
            row: dict[int, float] = {} if by is None else {by: 1.0}
            limit = 0.0 if by is not None else -1.0
            for value, share in _shares(read):
                maker = graph.maker[value]
                if maker not in recomputed:
                    limit += share  # an input; what is yet to come may be there in time
                    continue
                for column in (run.get(maker), column_of[value]):
                    if column is None:
                        continue  # of operands: it has FLOPs, so its results are there or not
                    row[column] = row.get(column, 0.0) - share
            if limit < (0.0 if by is None else 1.0):
                rows.append(row)
                limits.append(limit)

        for reads, run in ((wanted, recomputed), (operands, fused)):
            for read in reads:
                needs(read, None, run)
            for number, at in run.items():
                for read in graph.nodes[number].reads:
                    needs(read, at, run)
        scale = max(room, 1)
        rows.append({column_of[value]: graph.sizes[value] / scale for value in values})
        limits.append(room / scale)
        entries = [(at, column, x) for at, row in enumerate(rows) for column, x in row.items()]
        lines, columns, numbers = zip(*entries, strict=True)
        matrix = csr_array((numbers, (lines, columns)), shape=(len(rows), len(cost)))
        found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=(0, 1), method="highs")
        if found.status == 2:  # infeasible
            return None
        return float(found.fun) if found.status == 0 else 0.0

    def _made_of(self, reads: Iterable[Read], free: bool = False) -> Set[int]:
        """The nodes that some reads are made of, but for those that come later; ``free``: as far as
        none of them has FLOPs."""
        found: set[int] = set()
        pending = list(reads)
        while pending:
            for maker in _makers(self.graph, [pending.pop()]):
                counts = not (free and self.graph.nodes[maker].flops)
                if counts and maker not in self.later and maker not in found:
                    found.add(maker)
                    pending.extend(self.graph.nodes[maker].reads)
        return found


def _shares(read: Read) -> Iterator[tuple[int, float]]:
    """The values that a read takes, and how much of the whole of each may stand for all of it: of
    the last iteration all that is there of any."""
    yield read.value, float(read.length) if read.last else 1.0
    if read.initial is not None:
        yield read.initial, 1 / read.length
