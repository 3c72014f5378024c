"""The answer that stands first, on pages and in terminals: whether a step fits."""

from jaxmem.ground.bytes import format_against, format_bytes


def fits(device: int, budget: int | None, usable: int) -> bool | None:
    """Whether so many bytes are within the budget, or else within what is usable on the target;
    None: neither is known."""
    allowed = budget if budget is not None else usable
    return device <= allowed if allowed else None


def verdict(device: int, budget: int | None, usable: int) -> str:
    """The same in words: ``"fits: 712.00 MiB of the budget of 900.00 MiB, 79%"``."""
    allowed = budget if budget is not None else usable
    size = format_bytes(device)
    if not allowed:
        return f"takes {size}"
    whole = f"{format_bytes(allowed)} usable"
    if budget is not None:
        whole = f"the budget of {format_bytes(allowed)}"
    if device <= allowed:
        return f"fits: {size} of {whole}, {share(device / allowed)}"
    over = format_bytes(device - allowed)
    return f"does not fit: {size} is {over} more than {whole}"


def short_verdict(size: int, budget: int | None) -> str:
    """The same before other words: ``"fits: 712.00 MiB of 900.00 MiB"``."""
    if budget is None:
        return f"takes {format_bytes(size)}"
    fit = "fits" if size <= budget else "does not fit"
    return f"{fit}: {format_against(size, budget)} of {format_bytes(budget)}"


def share(part: float) -> str:
    """A share of a whole in percent."""
    text = f"{part:.0%}"
    return "under 1%" if part and text == "0%" else text
