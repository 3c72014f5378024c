"""The command line."""

from jaxmem.cli.entry import main as main
