"""Checks of a run before its processes start."""
