"""The command line."""

from jaxmem.cli.commands import main as main
