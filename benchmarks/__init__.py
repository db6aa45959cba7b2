"""Measurements against peers and limits. `python -m benchmarks [names...]` runs them and prints one table."""
