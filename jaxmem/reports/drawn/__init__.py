"""Text, plots and pages."""
