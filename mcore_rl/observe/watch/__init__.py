"""Live terminal view of a run. It reads files only, so it works on every host that sees the run directory.

    run directory --report.run_files, report.alerts, responses--> snapshot --frame, sparkline, bands--> terminal
    run.lock -----heartbeat-------------------------------------> snapshot

`live` repeats this until the run has finished.
"""
