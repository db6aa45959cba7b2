"""Optimizer, its state and offloading, and gradient norms."""
