"""How long a compiled step takes, and what of it."""
