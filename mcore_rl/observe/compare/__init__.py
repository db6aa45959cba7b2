"""Comparison of runs: configurations, metrics at the last common step, best validation accuracy.

run directories --report.run_files--> runs --sides--> sides --rows, permutation--> rows --tables--> terminal
"""
