"""report.html: one self-contained page about one or several runs.

    run directories --run_files--> metrics, configuration --series, alerts, differences--> summary
    rollouts/*.jsonl --responses--> statistics per step, sample of responses --pages--> compressed blocks
    timeline.json --step_spans--> spans per step ------------------------------pages--> compressed blocks
    summary, blocks, assets --page--> report.html

Every part has a share of the page's size, so a report of any run stays below MAX_BYTES (pages.py).
"""
