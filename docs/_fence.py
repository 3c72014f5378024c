"""Docstrings as Markdown: doctests as blocks of code (a griffe extension)."""

import re

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)


class Fence(griffe.Extension):
    """Puts each doctest into a fence."""

    def on_object(self, *, obj, **_):
        """Of every function, class and attribute."""
        if obj.docstring:
            text = DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = text
