"""How optimizer state is stored in fewer bits."""
