"""Replies in the format of a JSON schema."""
