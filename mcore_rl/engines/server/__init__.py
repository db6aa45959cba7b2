"""Servers with other models, which return log-probabilities of given tokens."""
