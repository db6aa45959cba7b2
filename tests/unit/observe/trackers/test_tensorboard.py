import re
import shutil
import sys
import threading
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.observe.report.series import CHARTS
from mcore_rl.observe.trackers.tensorboard import TensorBoardLog
from tests.unit.observe.trackers.recorded import HOSTILE, facts, response


@contextmanager
def opened(run_dir, first_step=0):
    log = TensorBoardLog(facts(run_dir, first_step=first_step))
    yield log
    log.close(failed=False)


def read(run_dir):
    """Read the scalars as TensorBoard does: {tag: [(step, value)]}."""
    accumulator = load(run_dir)
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def load(run_dir):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return accumulator


def text(run_dir, tag, place=0):
    return load(run_dir).Tensors(tag)[place].tensor_proto.string_val[0]


def test_tensorboard_reads_written_scalars(tmp_path):
    with opened(tmp_path) as log:
        log.append(0, {"reward/mean": 0.25, "step": 0}, [])
        log.append(1, {"reward/mean": 0.5}, [])
        assert read(tmp_path)["reward/mean"] == [(0, 0.25), (1, 0.5)]  # on disk before close
    assert set(read(tmp_path)) == {"reward/mean", "step"}


def test_tensorboard_resume_replaces_repeated_steps(tmp_path):
    with opened(tmp_path) as log:
        for step in range(5):
            log.append(step, {"loss": step}, [])
    with opened(tmp_path, first_step=3) as log:
        log.append(3, {"loss": 30}, [])
        log.append(4, {"loss": 40}, [])
    assert read(tmp_path)["loss"] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]


def test_tensorboard_log_needs_no_tensorflow(tmp_path):
    with opened(tmp_path) as log:
        log.append(1, {}, [response()])
    assert "tensorflow" not in sys.modules


def test_tensorboard_log_deleted_directory_raises_nothing(tmp_path, capfd):
    threads = threading.active_count()
    with opened(tmp_path / "run") as log:
        assert threading.active_count() == threads  # a thread of the writer would print a traceback
        shutil.rmtree(tmp_path / "run")
        log.append(1, {"loss": 1.0}, [])
    assert not capfd.readouterr().err


def test_tensorboard_shows_configuration_revision_and_versions(tmp_path):
    with opened(tmp_path):
        pass
    shown = text(tmp_path, "run").decode().splitlines()
    expected = {"actor.optimizer.lr: 1e-06", "environment.revision: abc-dirty", "environment.python: 3.11"}
    assert expected <= {line.strip() for line in shown}


def test_tensorboard_shows_hostile_responses_as_code(tmp_path):
    from tensorboard.plugin_util import markdown_to_safe_html

    with opened(tmp_path) as log:
        log.append(1, {}, [response(), response(is_validation=True, text="valid")])
    html = markdown_to_safe_html(text(tmp_path, "responses/training"))
    assert "<h1>" not in html
    assert "</script>" not in html
    assert "&lt;/script&gt;" in html
    assert "heading" in re.search(r"Response</strong></p>\n<pre><code>(.*?)</code></pre>", html, re.DOTALL)[1]
    assert "valid" in text(tmp_path, "responses/validation").decode()
    assert HOSTILE.splitlines()[-1] in html


def test_tensorboard_panels_select_the_metrics_of_the_report(tmp_path):
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    with opened(tmp_path):
        pass
    layout = layout_pb2.Layout.FromString(text(tmp_path, metadata.CONFIG_SUMMARY_TAG))
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert len(charts) == len(CHARTS)

    def matches(title, metric):
        return any(re.match(pattern, metric) for pattern in charts[title])

    assert matches("Accuracy (fraction)", "val/accuracy")
    assert matches("Accuracy (fraction)", "val/accuracy/gsm8k")
    assert not matches("Reward", "reward/mean_of_others")
