import pytest

from jaxmem import BudgetError, format_bytes
from jaxmem._bytes import parse_budget


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
    with pytest.raises(BudgetError, match="'80%' is a share of a target's memory, and no target"):
        parse_budget("80%")


@pytest.mark.parametrize("text", ["", "GiB", "11 gigs", "11 GiB!", "1,5GiB", "-3GiB", "nan", "%"])
def test_text_that_does_not_parse_names_the_forms(text):
    with pytest.raises(BudgetError, match="does not parse. Write an int of bytes, or a number and"):
        parse_budget(text)


@pytest.mark.parametrize("value", [0, -1, "0GiB", "0%", "1e999GiB"])
def test_budgets_are_positive(value):
    with pytest.raises(BudgetError, match="is not a positive number of bytes"):
        parse_budget(value, capacity=100)


@pytest.mark.parametrize("value", [1.5, True, None, b"1GiB"])
def test_other_types_are_refused(value):
    with pytest.raises(BudgetError, match="A budget is an int of bytes or text such as '11GiB'"):
        parse_budget(value)


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
