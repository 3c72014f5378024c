"""Words of printed texts."""


def pluralize(count: int, noun: str) -> str:
    """``"1 region"``, ``"2 regions"``."""
    return f"{count} {noun}{'s' * (count != 1)}"
