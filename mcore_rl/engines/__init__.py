"""Inference engines, one folder each. Only they import an engine; all other code uses the Protocols in ports."""
