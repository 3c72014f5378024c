"""The version of jaxmem."""

__version__ = "0.1.0"
