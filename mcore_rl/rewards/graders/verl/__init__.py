"""Helper functions of verl's scoring modules, by their documented behaviour, for users' files that import them."""
