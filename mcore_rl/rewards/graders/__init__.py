"""Graders that rows choose by their data_source: the published rule of each data set, one file for each kind."""
