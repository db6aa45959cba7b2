"""Graders that follow the published rules of data sets; rows select them by their data_source."""
