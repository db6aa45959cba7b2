"""Strict reading of files that come from outside: regular files, JSON, paths that stay inside a directory."""
