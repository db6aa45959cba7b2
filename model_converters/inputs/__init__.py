"""Strict reading of untrusted files: regular files only, unambiguous JSON, paths confined to a directory."""
