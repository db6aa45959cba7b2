"""Computation of a training step: micro-batches, log-probabilities, objective, router replay."""
