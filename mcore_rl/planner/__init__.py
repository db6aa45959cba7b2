"""Preflight: memory and time of a run, computed without a GPU before it starts."""
