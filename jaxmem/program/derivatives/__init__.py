"""Derivatives that take less memory than JAX's own."""
