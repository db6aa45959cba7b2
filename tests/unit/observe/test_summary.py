from mcore_rl.observe.summary import summary_table


def test_before_after_and_change_of_accuracy():
    records = [
        {"step": 0, "val/accuracy": 0.25},
        {"step": 1, "val/accuracy": None, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.3},
        {"step": 3, "val/accuracy": 0.875, "reward/mean": 0.05},
    ]
    table = summary_table(records).splitlines()
    assert table[2].split() == ["validation", "accuracy", "0.250", "(step", "0)", "0.875", "(step", "3)", "+0.625"]
    assert table[3].split()[-1] == "-0.050"
    assert len({len(line) for line in table}) == 1


def test_a_metric_seen_once_has_no_change():
    (line,) = [line for line in summary_table([{"step": 0, "val/accuracy": 0.25}]).splitlines() if "accuracy" in line]
    assert line.split() == ["validation", "accuracy", "-", "0.250", "(step", "0)", "-"]


def test_a_run_without_steps_says_so():
    assert summary_table([]) == "no step has been recorded"
