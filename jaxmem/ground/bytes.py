"""Budgets and byte arithmetic: ints inside, units only when printed."""

import math
import numbers
import re

from jaxmem.ground.errors import BudgetError, JaxmemError
from jaxmem.ground.warn import warn

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power

_LEAST_BUDGET = 1024  # of bytes without a unit: too few to plan with, so another unit was meant
_BUDGET = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


def parse_budget(
    budget: int | str, capacity: int | None = None, *, what: str = "budget", least: int = 1
) -> int:
    """Bytes of a budget.

    Args:
        budget: bytes as an int, or text: ``"11GiB"``, ``"40GB"``, ``"512 MiB"``, ``"80%"``.
        capacity: bytes that a percentage refers to (the usable bytes of a target).
        what: how errors call it.
        least: bytes that it has to be; 0 where there may be none.

    Returns:
        An int, rounded down.

    Raises:
        BudgetError: the text does not parse, is less, or is a percentage of nothing.

    >>> parse_budget("11GiB")
    11811160064
    >>> parse_budget("80%", capacity=1000)
    800
    """
    if isinstance(budget, bool) or not isinstance(budget, numbers.Integral | str):
        raise BudgetError(
            f"A {what} is an int of bytes or text such as '11GiB', '40GB' or '80%'; got "
            f"{budget!r} of type {type(budget).__name__}."
        )
    if not isinstance(budget, str):
        value = float(budget) if abs(budget) < 2**1000 else math.inf
    else:
        match = _BUDGET.fullmatch(budget)
        unit = match[2].lower() if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise BudgetError(
                f"The {what} {budget!r} does not parse. Write an int of bytes, or a number and "
                "a unit: '11GiB', '40GB', '512MiB', or '80%' of a target."
            )
        number = float(match[1])
        if unit == "%":
            if capacity is None:
                raise BudgetError(
                    f"The {what} {budget!r} is a share of a target's memory, and there is no "
                    "target. Pass one, or a number of bytes."
                )
            value = number / 100 * capacity
        else:
            value = number * _UNITS[unit]
    if not math.isfinite(value) or value < least:
        kind = "a positive number of bytes" if least else "a number of bytes of 0 or more"
        raise BudgetError(f"The {what} {budget!r} is not {kind}.")
    return int(value) if isinstance(budget, str) else int(budget)


def device_budget(budget: int | str | None, usable: int | None = None, name: str = "") -> int:
    """Bytes that a step may take: the budget, or what is usable on the device if that is less.

    Args:
        budget: as for `parse_budget`; None: all that is usable.
        usable: bytes of the device that a step can have; None or 0: not known, nothing is compared.
        name: of the device.

    Returns:
        A positive int. `JaxmemWarning` says so where the device has less than the budget.

    Raises:
        JaxmemError: there is no budget, and what is usable is not known.
        BudgetError: the budget does not parse, or is a number without a unit that is too small.

    >>> device_budget("20GiB", 23 * 2**30, "rtx-3090") // 2**30
    20
    """
    if budget is None:
        if not usable:
            raise JaxmemError(f"The memory of the target {name!r} is not known; pass a budget.")
        return usable
    allowed = parse_budget(budget, usable or None)
    if allowed < _LEAST_BUDGET and str(budget).strip()[-1].isdigit():
        raise BudgetError(
            f"A budget without a unit is in bytes, and {allowed} bytes are too few to plan "
            f"with. Write '{allowed}GiB' if you mean GiB, or '{allowed}B'."
        )
    if usable and allowed > usable:
        warn(
            f"The budget {budget!r} is {format_against(allowed, usable)}, and {name} has "
            f"{format_bytes(usable)} that a step can use: that is the budget now.",
        )
        return usable
    return allowed


def format_bytes(count: int) -> str:
    """Text of a number of bytes in binary units.

    >>> format_bytes(11811160064)
    '11.00 GiB'
    >>> format_bytes(512)
    '512 B'
    """
    sign, size = ("-", -count) if count < 0 else ("", count)
    if size < 1024:
        return f"{sign}{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.995 or unit == "TiB":
            break
    return f"{sign}{value:.2f} {unit}"


def format_against(count: int, allowed: int) -> str:
    """Text of a number of bytes beside that of those allowed: where both would read alike and there
    are more, by how many.

    >>> format_against(80 * 2**20 + 120, 80 * 2**20)
    '80.00 MiB + 120 B'
    >>> format_against(81 * 2**20, 80 * 2**20)
    '81.00 MiB'
    """
    text = format_bytes(count)
    alike = count > allowed and text == format_bytes(allowed)
    return f"{text} + {format_bytes(count - allowed)}" if alike else text
