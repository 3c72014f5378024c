"""The list of cases names tests that there are."""

import pathlib
import re

FOLDER = pathlib.Path(__file__).parent


def test_every_test_of_the_list_is_there():
    tests = {
        name
        for file in FOLDER.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    rows = [line.split("|") for line in (FOLDER / "README.md").read_text().splitlines()]
    ours = [row[2] for row in rows if len(row) == 4 and re.search("`test_", row[2])]
    named = {name for cell in ours for name in re.findall(r"`(test_\w+)`", cell)}
    assert len(named) > 50 and named <= tests
