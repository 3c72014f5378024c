"""Modules of Flax as functions of arrays."""
