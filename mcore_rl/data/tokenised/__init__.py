"""Rows become tokens, in one process or several, once or from a cache."""
