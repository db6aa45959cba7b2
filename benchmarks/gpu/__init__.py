"""Benchmarks that need a GPU. Each has `run(device="cuda", size=...)`; a small size on "cpu" only runs the code."""
