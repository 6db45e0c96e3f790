"""Decisions without I/O: time, randomness and state come in as arguments."""
