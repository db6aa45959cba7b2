"""Conversion of checkpoints and of single weights."""
