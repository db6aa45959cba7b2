"""The weight files of an HF directory: the files that its index lists, and the others."""
