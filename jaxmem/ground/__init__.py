"""Errors, bytes and checks that every wing uses."""
