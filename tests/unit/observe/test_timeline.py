import itertools
import json
import random

from mcore_rl.observe.timeline import Timeline, read_timeline
from mcore_rl.types import Span


def spans_of(events):
    """Return (process, name, start in seconds, seconds) of every complete event."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [(names[e["pid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]


def test_timeline_is_json_array_after_every_append(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    assert json.loads(path.read_text()) == []
    expected = []
    for step in range(5):
        batch = [Span("update", step, step + 0.5, "actor 0"), Span("generate", step, step + 0.25, f"engine {step % 2}")]
        timeline.append(batch)
        timeline.append([])
        expected += [(s.process, s.name, s.start, s.end - s.start) for s in batch]
        assert sorted(spans_of(json.loads(path.read_text()))) == sorted(expected)


def test_timeline_names_each_process_once(tmp_path):
    path = tmp_path / "timeline.json"
    for step in range(3):  # a new Timeline each time, as after a resume
        Timeline(path).append([Span("a", step, step + 1, "driver"), Span("b", step, step + 1, f"actor {step}")])
    introductions = [e for e in json.loads(path.read_text()) if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in introductions] == ["driver", "actor 0", "actor 1", "actor 2"]
    assert len({e["pid"] for e in introductions}) == 4
    assert all(e["ph"] == "M" for e in introductions)


def test_timeline_times_are_unix_microseconds(tmp_path):
    path = tmp_path / "timeline.json"
    Timeline(path).append([Span("a", 1_800_000_000.25, 1_800_000_000.75, "driver")])
    event = json.loads(path.read_text())[-1]
    assert (event["ts"], event["dur"]) == (1_800_000_000_250_000, 500_000)


def test_timeline_cut_at_any_byte_keeps_complete_events(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    for step in range(2):
        timeline.append([Span(f"step {step}", step, step + 1, "driver")])
    content = path.read_bytes()
    whole_events = len(json.loads(content))
    for size in range(len(content)):
        path.write_bytes(content[:size])
        events = len(read_timeline(path))
        # Whole lines of the file (all but the brackets) are events, and so is the last one if only its end is missing.
        assert events >= min(max(content[:size].count(b"\n") - 1, 0), whole_events)
        mended = Timeline(path)
        assert len(json.loads(path.read_text())) == events
        mended.append([Span("after", 9, 10, "driver")])
        assert spans_of(json.loads(path.read_text()))[-1] == ("driver", "after", 9, 1)


def test_crossing_spans_use_different_lanes(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    draw = random.Random(0)
    for _ in range(5):
        starts = [draw.randrange(100) for _ in range(20)]
        timeline.append([Span("s", start, start + draw.randrange(30), f"p{start % 2}") for start in starts])
    events = [e for e in json.loads(path.read_text()) if e["ph"] == "X"]
    by_start = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    for a, b in itertools.combinations(by_start, 2):
        if (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
            a_end, b_end = a["ts"] + a["dur"], b["ts"] + b["dur"]
            assert b["ts"] >= a_end or b_end <= a_end, "neither after nor inside"


def test_nested_spans_use_one_lane(tmp_path):
    path = tmp_path / "timeline.json"
    Timeline(path).append(
        [Span("inner", 1, 2, "driver"), Span("step", 0, 5, "driver"), Span("next", 5, 6, "driver")],
    )
    assert [e["tid"] for e in json.loads(path.read_text()) if e["ph"] == "X"] == [0, 0, 0]
