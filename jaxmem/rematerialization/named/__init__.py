"""Policies for regions that stay where the user has them: which values to save, by name or by
operation."""
