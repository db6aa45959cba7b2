"""Comparison of runs: configurations, metrics at the last common step, best validation accuracy.

    run directories --report.run_files--> runs --sides--> sides
    sides --metric_comparison, permutation--> means, differences, p --command--> terminal

A side is one run, or several runs that differ only in run.seed.
"""
