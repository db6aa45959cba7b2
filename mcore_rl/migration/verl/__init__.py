"""Translation of verl's configuration keys."""
