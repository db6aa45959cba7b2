"""Notations of final answers and the rules that compare them."""
