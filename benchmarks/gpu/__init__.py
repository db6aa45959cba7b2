"""Benchmarks that need a GPU. Each has `run(device="cuda", size=...)`; a small size on "cpu" tries its code out."""
