"""Conversion of configuration files and command-line overrides to values of the schema."""
