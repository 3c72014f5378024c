"""Every figure of the documentation, and the scripts that make them: see README.md."""
