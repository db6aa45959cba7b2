"""Preflight: what a configuration needs, computed before anything starts and without a GPU."""
