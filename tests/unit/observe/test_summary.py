from mcore_rl.observe.summary import summary_table


def test_summary_shows_first_best_last_and_change():
    records = [
        {"step": 0, "val/accuracy": 0.25},
        {"step": 1, "val/accuracy": None, "reward/mean": 0.1},
        {"step": 2, "val/accuracy": 0.875, "reward/mean": 0.3},
        {"step": 3, "val/accuracy": 0.875, "reward/mean": 0.2},
        {"step": 4, "val/accuracy": 0.75, "reward/mean": 0.05},
    ]
    table = summary_table(records).splitlines()
    cells = ["0.250", "(step", "0)", "0.875", "(step", "2)", "0.750", "(step", "4)", "+0.500"]
    assert table[2].split() == ["validation", "accuracy", *cells]
    assert table[3].split() == ["reward", "(training)", "0.100", "(step", "1)", "0.050", "(step", "4)", "-0.050"]
    assert len({len(line) for line in table}) == 1


def test_summary_metric_recorded_once_has_no_change():
    (line,) = [line for line in summary_table([{"step": 0, "val/accuracy": 0.25}]).splitlines() if "accuracy" in line]
    assert line.split() == ["validation", "accuracy", "-", "-", "0.250", "(step", "0)", "-"]


def test_summary_fits_80_columns():
    keys = ("val/accuracy", "reward/mean", "response_tokens/mean", "actor/entropy")
    records = [{"step": step, **dict.fromkeys(keys, value)} for step, value in ((0, 0.5), (99, 0.75), (100, 0.625))]
    assert max(map(len, summary_table(records).splitlines())) <= 80


def test_summary_without_steps_has_message():
    assert summary_table([]) == "no step has been recorded"
