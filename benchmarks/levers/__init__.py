"""The other levers, each alone: bytes, FLOPs, and what it does to a training."""
