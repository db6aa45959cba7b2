"""Reimplementation of verl's scoring helpers, from their documented behaviour, for users' files that import them."""
