"""Confined and limited execution of code that a model wrote."""
