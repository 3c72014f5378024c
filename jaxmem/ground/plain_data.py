"""Reads dataclasses back from plain data, as JSON has it, and says which field is wrong."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "an object",
}


_LARGEST = 10**30  # more than any bytes or FLOPs, and a number that can be printed: chosen


def from_plain(kind: Any, value: Any, name: str = "it") -> Any:
    """A value of a type: a number, a bool, text, a tuple, a dataclass of such, or None; of `Any`
    it is any. A class that has a method ``from_plain(row, name)`` makes its own.

    Args:
        name: what errors call it.

    Raises:
        ValueError: it is of another type, a field is missing, or there is one more; in words.
    """
    if hasattr(kind, "from_plain"):
        return kind.from_plain(_checked(dict, value, name), name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**fields_from_plain(kind, value, name))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        (other,) = set(inner) - {type(None)}
        return None if value is None else from_plain(other, value, name)
    if origin is tuple:
        values = _checked(list, value, name)
        if inner[-1] is ...:
            inner = inner[:1] * len(values)
        if len(values) != len(inner):
            raise ValueError(f"{name} has {len(values)} values, not {len(inner)}")
        return tuple(
            from_plain(one, value, f"{name}[{at}]")
            for at, (one, value) in enumerate(zip(inner, values, strict=True))
        )
    return _with_tuples(value) if kind is Any else _checked(kind, value, name)


def fields_from_plain(
    kind: type, value: Any, name: str = "it", but: Mapping[str, Any] = types.MappingProxyType({})
) -> dict[str, Any]:
    """The fields of a dataclass; those in ``but`` are not read, and have the values there."""
    row, known = _checked(dict, value, name), _kinds(kind)
    if missing := [field for field in known if field not in row]:
        raise ValueError(f"{name} has no {missing[0]!r}")
    if more := [field for field in row if field not in known]:
        raise ValueError(f"{name} has {more[0]!r}, which is no part of it")
    return {
        field: but[field] if field in but else from_plain(one, row[field], _of(name, field))
        for field, one in known.items()
    }


@functools.cache
def _kinds(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _of(name: str, field: str) -> str:
    return field if name == "it" else f"{name}.{field}"


def _checked(kind: type, value: Any, name: str) -> Any:
    wanted = (int, float) if kind is float else kind
    is_wanted = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if not is_wanted:
        raise ValueError(f"{name} is not {_NAMES[kind]} but {_short(value)}")
    if wanted not in (bool, str) and isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{name} has more than 30 digits")
    return value


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return _NAMES[type(value)]
    return "null" if value is None else repr(value)


def _with_tuples(value: Any) -> Any:
    """What JSON has, with tuples in place of its lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(one) for name, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
