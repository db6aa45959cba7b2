"""The weight table: rows, transforms, layouts, and who holds and writes what."""
