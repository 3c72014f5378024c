"""What makes a step smaller, each lever by itself."""
