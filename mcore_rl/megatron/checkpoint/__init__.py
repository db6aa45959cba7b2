"""Checkpoints of ranks: written while training goes on, read in any other layout."""
