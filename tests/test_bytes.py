import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import BudgetError, JaxmemWarning, Largest, format_bytes
from jaxmem.ground.bytes import device_budget, format_against, parse_budget
from jaxmem.reports.drawn.verdict import short_verdict, verdict

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("11GiB", 11 * 2**30),
        ("40GB", 40 * 10**9),
        (" 512 mib ", 512 * 2**20),
        ("1.5KiB", 1536),
        ("1e3", 1000),
        ("7b", 7),
        (123, 123),
        ("2TB", 2 * 10**12),
    ],
)
def test_budgets_parse(text, expected):
    assert parse_budget(text) == expected


def test_a_percentage_is_of_the_capacity():
    assert parse_budget("12.5%", capacity=8000) == 1000
    with pytest.raises(
        BudgetError, match="is a share of a target's memory, and there is no target"
    ):
        parse_budget("80%")


@pytest.mark.parametrize("text", ["", "GiB", "11 gigs", "11 GiB!", "1,5GiB", "-3GiB", "nan", "%"])
def test_text_that_does_not_parse_names_the_forms(text):
    with pytest.raises(BudgetError, match="does not parse. Write an int of bytes, or a number and"):
        parse_budget(text)


@pytest.mark.parametrize("value", [0, -1, "0GiB", "0%", "1e999GiB", 10**400])
def test_budgets_are_positive(value):
    with pytest.raises(BudgetError, match="is not a positive number of bytes"):
        parse_budget(value, capacity=100)


@pytest.mark.parametrize("value", [1.5, True, None, b"1GiB"])
def test_other_types_are_refused(value):
    with pytest.raises(BudgetError, match="A budget is an int of bytes or text such as '11GiB'"):
        parse_budget(value)


def test_the_smaller_of_budget_and_device_counts_and_it_is_said():
    for budget in (2000, "100%", "2000B"):
        assert device_budget(budget, 2000, "small") == 2000
    assert device_budget("50%", 4000, "small") == 2000
    assert device_budget("5GiB") == device_budget("5GiB", 0) == 5 * 2**30  # nothing to compare with
    for budget, size in (("24GiB", "24.00 GiB"), ("120%", "2.40 KiB"), (4096, "4.00 KiB")):
        said = (
            rf"The budget '?{budget}'? is {size}, and small has 2.00 KiB that a step can use: that"
        )
        with pytest.warns(JaxmemWarning, match=said):
            assert device_budget(budget, 2048, "small") == 2048


@pytest.mark.parametrize("budget", [11, "11", " 24 ", 1023])
def test_a_handful_of_bytes_is_another_unit_forgotten(budget):
    said = "is in bytes, and .* bytes are too few to plan with. Write '.*GiB' if you mean GiB, or"
    with pytest.raises(BudgetError, match=said):
        device_budget(budget)
    assert device_budget("11B") == 11  # as it is written


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-1536, "-1.50 KiB"),
        (2**30 - 1, "1.00 GiB"),
        (11 * 2**30, "11.00 GiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_bytes_print_in_binary_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "allowed", "text"),
    [
        (80 * MIB, 80 * MIB, "80.00 MiB"),
        (80 * MIB + 1, 80 * MIB, "80.00 MiB + 1 B"),
        (80 * MIB + 3000, 80 * MIB, "80.00 MiB + 2.93 KiB"),
        (80 * MIB + 6000, 80 * MIB, "80.01 MiB"),
        (80 * MIB, 80 * MIB + 1, "80.00 MiB"),  # within it
        (1024, 1023, "1.00 KiB"),
        (2**30, 2**30 - 1, "1.00 GiB + 1 B"),
    ],
)
def test_more_bytes_than_allowed_never_read_like_those_allowed(count, allowed, text):
    assert format_against(count, allowed) == text


def a_byte_too_large(device, budget):
    """What says of so many bytes that they are more than the budget."""
    report = jaxmem.memory(jnp.sin, jnp.ones(256), target="h200")
    yield short_verdict(device, budget)
    yield verdict(device, budget, 0)
    yield Largest(0, 8, 8, budget, {8: device}, Sized(report, device)).reason
    yield Largest(8, 16, 8, budget, {16: device, 8: 0}, Sized(report, 0)).reason
    yield Largest(8, 16, 8, budget, {16: device, 8: 0}, Sized(report, 0)).__str__()


class Sized:
    """A report of so many bytes."""

    has_timeline, argument = False, 0

    def __init__(self, report, device):
        self.target, self.device = report.target, device


def test_every_refusal_shows_that_it_is_one():
    texts = list(a_byte_too_large(80 * MIB + 120, 80 * MIB))
    shown = [text for text in texts if "80.00 MiB + 120 B" in text]
    others = [text for text in texts if text not in shown]
    assert shown and others and all("120 B more than" in text for text in others), texts
    with pytest.warns(JaxmemWarning, match=r"is 80.00 MiB \+ 120 B, and small has 80.00 MiB that"):
        device_budget(80 * MIB + 120, 80 * MIB, "small")
