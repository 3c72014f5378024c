"""What a compiled program runs, one entry for each kernel, read in its optimised HLO."""

import dataclasses
import math
import re
from collections.abc import Mapping

from jaxmem.reports.xla.attention import attention_of, is_attention
from jaxmem.reports.xla.hlo import LABELS, SHAPE, Lines, operands_of, operation_of, window_of
from jaxmem.reports.xla.rows import TableRows, rows_of
from jaxmem.reports.xla.traffic import traffic
from jaxmem.reports.xla.work import Work, contractions

_PRECISION = re.compile(r"operand_precision=\{([\w,]*)\}|\"operand_precision\":\[([\w\",]*)\]")
_ALGORITHM = re.compile(r"algorithm=dot_(\w+)|\"algorithm\":\"ALG_DOT_(\w+)\"")
_ORDER = ("default", "high", "highest")
# HLO's names of the types that are multiplied, and of its algorithms, as `Target` takes them.
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "s8": "int8",
    "c64": "complex64",
    "c128": "complex128",
}
_KINDS = {"bf16": "bfloat16", "tf32": "tfloat32", "f16": "float16"}


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledContraction:
    """The matmul or convolution of a kernel: the dtype of its operands, how exact it is
    (`Target.flops_per_second`), and its result as a matrix: ``batch`` times ``rows`` by
    ``columns``, each a sum of ``depth`` products. Of a convolution ``window`` and whether its
    channels are last, as of `Target.convolving`."""

    kind: str
    dtype: str
    precision: str
    rows: int
    columns: int
    depth: int
    batch: int = 1
    window: tuple[int, ...] = ()
    channels_last: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel: the name of its instruction, FLOPs, bytes moved, its contraction, if any, and the
    rows of tables that are among what it moves."""

    name: str
    flops: int
    moved: int
    contraction: CompiledContraction | None = None
    rows: tuple[TableRows, ...] = ()


def kernel_of(name: str, computation: Lines, computations: Mapping[str, Lines]) -> CompiledKernel:
    """The kernel of one instruction."""
    line = computation[name]
    moved = traffic(line, computation, computations)
    found = list(contractions(line, computation, computations))
    flops = sum(work.flops for _, _, work in found)
    largest = max(found, key=lambda one: one[2].flops, default=None)
    rows = tuple(rows_of(line, computation, computations))
    return CompiledKernel(name, flops, moved, _contraction(*largest) if largest else None, rows)


def _contraction(line: str, computation: Lines, work: Work) -> CompiledContraction:
    if is_attention(line):
        return _scores(line, computation)
    kind = "convolution" if work.convolutions else "matmul"
    shapes = [SHAPE.search(computation[name]) for name in operands_of(line)]
    if operation_of(line) == "custom-call":  # a kernel may take masks and numbers of blocks too
        shapes = [one for one in shapes if one and one[1].startswith(("f", "bf", "c"))] or shapes
    shapes = [*shapes, None, None][:2]
    left, right, result = map(_elements, (*shapes, SHAPE.search(line)))
    name = shapes[0][1] if shapes[0] else "f32"
    dtype = _DTYPES.get(name, "float8" if name.startswith("f8") else "float32")
    products = 4 if dtype.startswith("complex") else 1
    depth = max(work.flops // max(2 * products * result, 1), 1)
    # (batch rows depth) (batch depth columns) (batch rows columns)
    batch = max(round((left / depth) * (right / depth) / max(result, 1)), 1)
    rows = max(round(left / depth / batch), 1)
    columns = max(result // (rows * batch), 1)
    if kind == "convolution":
        batch, columns = 1, max(round((right / depth) or 1), 1)
        rows = max(result // columns, 1)
    found = CompiledContraction(kind, dtype, _precision(line), rows, columns, depth, batch)
    if kind == "convolution":
        labels = LABELS.search(line)
        last = labels is None or labels[1].endswith("f")
        found = dataclasses.replace(found, window=_window(line), channels_last=last)
    return found


def _window(line: str) -> tuple[int, ...]:
    """Of a convolution of all channels, along all elements."""
    window = window_of(line)
    apart = not {"stride", "lhs_dilate", "rhs_dilate"}.isdisjoint(window)
    if apart or "size" not in window or "feature_group_count=" in line:
        return ()
    return tuple(map(int, window["size"].split("x")))


def _scores(line: str, computation: Lines) -> CompiledContraction:
    """The first matmul of an attention: the others are like it."""
    one, query = attention_of(line, computation), SHAPE.search(computation[operands_of(line)[0]])
    *batch, rows, columns = one.scores
    dtype = _DTYPES.get(query[1], "float8") if query else "float32"
    return CompiledContraction(
        "matmul", dtype, "default", rows, columns, one.width, math.prod(batch)
    )


def _elements(shape: re.Match | None) -> int:
    return math.prod(int(size) for size in shape[2].split(",") if size) if shape else 1


def _precision(line: str) -> str:
    algorithm = _ALGORITHM.search(line)
    if algorithm:
        kind, *_, last = (algorithm[1] or algorithm[2]).lower().split("_")
        if kind == "f32":
            return "highest"
        if kind in _KINDS:
            return _KINDS[kind] + (last if last.startswith("x") else "")
    found = _PRECISION.search(line)
    words = re.findall(r"\w+", (found[1] or found[2] or "").lower()) if found else []
    return max((word for word in words if word in _ORDER), key=_ORDER.index, default="default")
