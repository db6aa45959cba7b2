"""Invalid and hostile input: every script and every value gives a result or one message, in bounded time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tree_sitter_bash")

from mcore_rl.config.document import commented_yaml
from mcore_rl.errors import ConfigError
from mcore_rl.migration.shell.interpreter import evaluate_script
from mcore_rl.migration.slime.defaults import DEFAULTS
from mcore_rl.migration.slime.translation import translate as translate_slime
from mcore_rl.migration.source import Setting
from mcore_rl.migration.verl.defaults import ASYNCHRONOUS, COMMON, SUPERVISED
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.run import MODULE
from mcore_rl.migration.verl.translation import translate as translate_verl

TOKENS = r"""
    a= b=(x c+=1 ) " ' ` $( ${ } $(( )) $a "${b[@]}" ${a:-1} ${a##*/} if then fi [ ] [[ ]] && || ; | < > >> << EOF #
    case esac in ) ;; for do done while function f() { } eval source . shift set -- \ \\ == -gt -n 1 2 * ? ~ {1..3} & !
""".split()
VALUES = [None, "", "x", -1, 0, 1, 7, 0.5, 1e400, float("nan"), True, [], [1, "a"], {}, "${X}", "$(y)", "a_b", 10**30]
OTHERS = (
    "actor_rollout_ref.model.path model.path actor_rollout_ref.model.lora.rank critic.megatron.context_parallel_size "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size actor_rollout_ref.actor.megatron.param_offload "
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.actor.loss_agg_mode reward_model.enable "
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity trainer.total_training_steps "
    "actor_rollout_ref.rollout.multi_turn.tool_config_path algorithm.rollout_correction.rollout_is data.train_files"
).split()
VERL_KEYS = [*COMMON, *ASYNCHRONOUS, *SUPERVISED]
PROGRAMS = ("verl.trainer.main_ppo", "verl.trainer.sft_trainer", "a.fully_async_main", "a.one_step_off_policy.main_ppo")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*TOKENS, "\n", " "]), max_size=25))
def test_reader_any_text_ends_without_traceback(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        evaluate_script(" ".join(words), {}, Path("/nonexistent"))


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*COMMON, *ASYNCHRONOUS, *SUPERVISED, *OTHERS]), st.sampled_from(VALUES), max_size=12
    ),
    st.sampled_from(PROGRAMS),
    st.sampled_from([None, 1, 10**9]),
)
def test_import_verl_any_value_ends_without_traceback(
    values: dict[str, object], program: str, rows: int | None
) -> None:
    settings_ = {key: Setting(key, value, 1) for key, value in {**values, MODULE: program}.items()}
    source, draft, _ = translate_verl(settings_, rows)
    commented_yaml(draft.values, draft.origins, "title")
    assert all("\n" not in problem for problem in source.problems)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from([*DEFAULTS, "colocate", "loss-type"]), st.sampled_from(VALUES), max_size=12))
def test_import_slime_any_value_ends_without_traceback(values: dict[str, object]) -> None:
    _, draft, _ = translate_slime({key: Setting(f"--{key}", value, 1) for key, value in values.items()})
    commented_yaml(draft.values, draft.origins, "title")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("a=xxxxxxxx\n" + "a=$a$a\n" * 40, "the variable a of the script becomes larger"),
        ("a=(1 2)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 40, "the variable a of the script becomes larger"),
        ("f() { f; f; f; }; f", "evaluates more than 100000 statements"),
        ("( " * 3000 + "echo" + " )" * 3000, "nested too deeply"),
        ("echo $((" + "(" * 3000 + "1" + ")" * 3000 + "))", "nested too deeply"),
    ],
)
def test_reader_script_that_explodes_is_rejected(script: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError, match=message):
        evaluate_script(script, {}, Path())
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    "script",
    [
        "echo $((" + "(" * 8 + "9" + " ** 64)" * 8 + "))",
        f"echo $(({'9' * 5000})) ${{{'9' * 5000}}} ${{a[@]:0x1:{'9' * 5000}}} $(seq {'9' * 5000})",
        f"f() {{ shift {'9' * 5000}; shift x; shift -1; }}; f 1 2",
        "a=" + "xy" * 100_000 + "\necho ${a//*x*y*z/}",
    ],
)
def test_reader_large_numbers_and_texts_are_read_in_time(script: str) -> None:
    started = time.process_time()
    evaluate_script(script, {}, Path())
    assert time.process_time() - started < 10


def test_reader_yaml_that_contains_itself_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: &a\n  b: *a\n")
    with pytest.raises(ConfigError, match="recursive node"):
        read_verl(path, {})
