"""Distributed checkpoints, written during training and readable in any other layout."""
