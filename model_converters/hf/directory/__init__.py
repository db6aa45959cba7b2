"""Weight files of an HF directory: files listed in its index, and other files."""
