"""Rows and order of an epoch: weights of files, and curricula."""
