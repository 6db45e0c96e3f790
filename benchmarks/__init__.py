"""Benchmarks: what the guards cost, against the budgets. ``./run bench``."""
