"""Child processes of the project."""
