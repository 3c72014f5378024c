"""Attention by one kernel of a library's, read in optimised HLO."""

import dataclasses
import math
import re

from jaxmem.program.attention import computed_scores, flops_of_scores, matmuls_of_scores
from jaxmem.reports.xla.hlo import SHAPE, TARGET, Lines, operands_of
from jaxmem.targets import computed_by

_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{[^\]]*"dimensions": ?\[([\d", ]*)\]')
_WINDOW = re.compile(r'"sliding_window_length": ?"?(\d+)')
_MASK = re.compile(r'"mask_type": ?"(\w+)"')


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """The lengths of an attention whose scores (``[batch, heads, queries, keys]``) stay in the
    kernel: widths of keys and of values; whether it is the derivative, whether a causal mask leaves
    half of the scores out, and how many keys a query sees at most (0: all)."""

    scores: tuple[int, ...]
    width: int
    value_width: int
    is_derivative: bool
    is_causal: bool
    window: int

    @property
    def matmuls(self) -> int:
        """Of one kernel."""
        return matmuls_of_scores(self.is_derivative)

    @property
    def flops(self) -> int:
        """A multiply-add counts 2."""
        every, keys = math.prod(self.scores), self.scores[-1]
        scores = computed_scores(every, keys, self.is_causal, self.window)
        return flops_of_scores(scores, self.width, self.value_width, self.is_derivative)


def is_attention(line: str) -> bool:
    """Whether an instruction, given as its right-hand side, is a kernel for attention."""
    called = TARGET.search(line)
    return called is not None and computed_by(called[1]) == "attention"


def attention_of(line: str, computation: Lines) -> Attention:
    """The attention that a custom call computes, given as its right-hand side."""
    scores, mask, window, called = (one.search(line) for one in (_SCORES, _MASK, _WINDOW, TARGET))
    _, key, value = (_width(computation[name]) for name in operands_of(line)[:3])
    return Attention(
        tuple(map(int, re.findall(r"\d+", scores[1]))) if scores else (0,),
        key,
        value,
        bool(called and "Backward" in called[1]),
        bool(mask and "CAUSAL" in mask[1]),
        int(window[1]) if window else 0,
    )


def _width(line: str) -> int:
    shape = SHAPE.search(line)
    return int(shape[2].rpartition(",")[2] or 1) if shape else 0
