"""Graders and the processes that run them."""
