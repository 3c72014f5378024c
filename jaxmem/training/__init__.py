"""The training step that composes the levers."""
