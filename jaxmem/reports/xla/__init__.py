"""What XLA's own dumps say."""
