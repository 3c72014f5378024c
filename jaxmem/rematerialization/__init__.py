"""From a function and a budget to a planned function."""
