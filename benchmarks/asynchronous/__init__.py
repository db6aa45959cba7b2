"""Asynchronous training: driver costs, simulated engines, real runs."""
