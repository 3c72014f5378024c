"""Recomputation: how little of it a budget costs, beside other ways and beside PyTorch."""
