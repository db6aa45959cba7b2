"""Formats of responses as grammars: the tokens that may follow at each position."""
