"""Shorter dtypes."""
