"""Inference engines, a folder each: the only doors to them. Everything else sees the Protocols of ports."""
