"""Gradients of a batch in parts."""
