"""Whole training steps: what they take, what fits, and how large a batch may be."""
