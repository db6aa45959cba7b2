"""Rows, arguments and checks that several families share."""
