"""Which scores a softmax sees, where that is told by places alone: all of them, or those of keys up
to a query's own place."""

import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# What is added to a score, or stands in its place, where it is masked: models in float16 take
# -10,000, which is -9,984 in bfloat16. A softmax has 0 there, as long as no score of its row is as
# low.
_MASKED = -9984

_CASTS = ("convert_element_type", "copy")


class ScoreForm(NamedTuple):
    """Scores times ``scale``, all of them or (``is_causal``) those up to a query's own place."""

    scale: float
    is_causal: bool


def score_form_of(replacement: Any) -> ScoreForm | None:
    """What an `AttentionReplacement` does with its scores before the softmax; None: something
    else."""
    graph, match = replacement.graph, replacement.match
    known = {graph.flat.steps[match.root].outputs[0]: ScoreForm(1.0, False)}
    for at in match.chain:
        step = graph.flat.steps[at]
        found = _form_after(step.primitive, replacement.nodes[at], known)
        floating = jnp.issubdtype(graph.flat.avals[step.outputs[0]].dtype, jnp.floating)
        if found is None or not floating:
            return None
        known[step.outputs[0]] = found
    return known[match.matrix]


def _form_after(name: str, nodes: list[tuple], known: dict[int, ScoreForm]) -> ScoreForm | None:
    """Of an operation on scores and what is combined with them."""
    forms = [known[node[1]] for node in nodes if node[0] == "scores"]
    if len(forms) != 1:
        return None
    (form,), first = forms, nodes[0][0] == "scores"
    if name in (*_CASTS, "transpose"):
        return form
    if name == "select_n":
        return _selected(form, *nodes) if len(nodes) == 3 else None
    if len(nodes) != 2:
        return None
    other = nodes[1] if first else nodes[0]
    if name == "add":
        return _added(form, other)
    number = _number(other)
    if form.is_causal:
        return None  # what stands for a masked score may not be as low any more
    if number is None or not (name == "mul" or (name == "div" and first)):
        return None
    return form._replace(scale=form.scale * number if name == "mul" else form.scale / number)


def _selected(form: ScoreForm, which: tuple, no: tuple, yes: tuple) -> ScoreForm | None:
    """Scores where a condition holds (or does not), else a low number."""
    seen, number = (_condition(which), _number(no)) if yes[0] == "scores" else (None, None)
    if no[0] == "scores":
        seen, number = _not(_condition(which)), _number(yes)
    low = number is not None and number <= _MASKED
    return _masked(form, seen) if low else None


def _added(form: ScoreForm, other: tuple) -> ScoreForm | None:
    """With a low number where a condition holds, and 0 elsewhere."""
    if other[0] == "full":
        return _added(form, other[1])
    if other[0] == "step" and other[1].primitive in _CASTS:
        return _added(form, other[2][0])
    if other[0] != "step" or other[1].primitive != "select_n" or len(other[2]) != 3:
        return None
    which, no, yes = _condition(other[2][0]), *map(_number, other[2][1:])
    if no is None or yes is None:
        return None
    if yes == 0 and no <= _MASKED:
        return _masked(form, which)
    return _masked(form, _not(which)) if no == 0 and yes <= _MASKED else None


def _masked(form: ScoreForm, seen: "bool | _AtLeast | None") -> ScoreForm | None:
    if seen is True:
        return form
    causal = isinstance(seen, _AtLeast) and seen == _AtLeast(0, True)
    return form._replace(is_causal=True) if causal and form.scale > 0 else None


# ---- conditions on places


class _AtLeast(NamedTuple):
    """Whether a query's place less a key's is at least so much, or (``holds`` is false) less."""

    distance: int
    holds: bool


_COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


def _condition(node: tuple) -> "bool | _AtLeast | None":
    """True, false, or by places; None: not known."""
    kind, *rest = node
    if kind == "full":
        return _condition(rest[0])
    if kind == "number":
        return bool(rest[0]) if np.ndim(rest[0]) == 0 else None
    if kind != "step":
        return None
    step, nodes = rest
    if step.primitive in _COMPARISONS:
        return _compared(step.primitive, *map(_places, nodes))
    if step.primitive not in ("and", "not", "select_n", *_CASTS):
        return None
    found = [_condition(one) for one in nodes]
    if step.primitive == "not":
        return _not(found[0])
    if step.primitive == "and":
        return found[1] if found[0] is True else found[0] if found[1] is True else None
    if step.primitive == "select_n":
        which, no, yes = found
        return which if (no, yes) == (False, True) else None
    return found[0]


def _not(condition: "bool | _AtLeast | None") -> "bool | _AtLeast | None":
    if isinstance(condition, _AtLeast):
        return condition._replace(holds=not condition.holds)
    return None if condition is None else not condition


def _compared(name: str, one: Any, other: Any) -> _AtLeast | None:
    """Of two sums of places and numbers."""
    if one is None or other is None:
        return None
    row, column, number = (a - b for a, b in zip(one, other, strict=True))
    if (row, column) not in ((1, -1), (-1, 1)):
        return None
    # Of the distance d it compares d + number with 0, or number - d: which d are just enough?
    same = -row * number
    holds = [_COMPARISONS[name](row * d + number, 0) for d in (same - 1, same, same + 1)]
    first = same if holds[1] != holds[0] else same + 1
    return _AtLeast(first, holds[2])


def _places(node: tuple) -> tuple[int, int, int] | None:
    """A sum of so many times a query's place, a key's and 1; None: it is something else, or in a
    type that rounds places, or that has none below 0."""
    kind, *rest = node
    if kind == "place":
        place = (1, 0, 0) if rest[1] else (0, 1, 0)
        return place if _is_exact(rest[0]) else None
    if kind == "full":
        return _places(rest[0])
    if kind == "number":
        whole = np.ndim(rest[0]) == 0 and float(rest[0]).is_integer()
        return (0, 0, int(rest[0])) if whole else None
    if kind != "step" or rest[0].primitive not in ("add", "sub", *_CASTS):
        return None
    if not _is_exact(rest[0].equation.outvars[0].aval.dtype):
        return None
    one, other = _places(rest[1][0]), _places(rest[1][-1])
    if one is None or other is None or len(rest[1]) == 1:
        return one if len(rest[1]) == 1 else None
    sign = -1 if rest[0].primitive == "sub" else 1
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


def _is_exact(dtype: Any) -> bool:
    signed = jnp.issubdtype(dtype, jnp.signedinteger) or jnp.issubdtype(dtype, jnp.floating)
    return signed and dtype.itemsize >= 4


def _number(node: tuple) -> float | None:
    """A number; None: it is another for different scores."""
    kind, *rest = node
    if kind == "full":
        return _number(rest[0])
    if kind == "number":
        return float(rest[0]) if np.ndim(rest[0]) == 0 else None
    if kind == "step" and rest[0].primitive in ("neg", *_CASTS):
        found = _number(rest[1][0])
        return found if found is None or rest[0].primitive != "neg" else -found
    return None
