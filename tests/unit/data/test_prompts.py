import pickle
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.schema import DataConfig, RolloutConfig
from mcore_rl.data.loading import load_prompts
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError, DataError
from tests.unit.data import rows as files

SHARED_GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = [{"question": "1+1=", "answer": "so #### 2"}, {"question": "2+2=", "answer": "so #### 4"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def jsonl(tmp_path, rows):
    return files.jsonl(tmp_path / "prompts.jsonl", rows)


def parquet(tmp_path, rows):
    return files.parquet(tmp_path / "prompts.parquet", rows)


def load(path, tokenizer, *, limit=512, key="data.train", **data):
    return load_prompts(path, tokenizer, DataConfig(**data), RolloutConfig(max_prompt_tokens=limit), key)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_load_prompts_plain_rows_use_question_and_plain_template(tmp_path, tokenizer, write):
    prompts, report = load(write(tmp_path, PLAIN), tokenizer, plain_template="Q: {prompt} A: {x}")
    prompt = prompts[1]
    assert (prompt.row, prompt.text, prompt.ground_truth) == (1, "Q: 2+2= A: {x}", "so #### 4")
    assert (prompt.data_source, prompt.extra_info) == ("unknown", {})
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.token_ids.dtype == np.int32
    assert (report.kept, report.dropped) == (2, 0)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_load_prompts_verl_rows_are_unchanged(tmp_path, chat_tokenizer, write):
    prompt = load(write(tmp_path, [VERL, VERL]), chat_tokenizer)[0][0]
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("openai/gsm8k", "2", VERL["extra_info"])
    expected = chat_tokenizer.apply_chat_template(VERL["prompt"], add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids.tolist() == expected


def test_load_prompts_plain_prompt_becomes_user_message(tmp_path, chat_tokenizer):
    path = jsonl(tmp_path, PLAIN)
    assert load(path, chat_tokenizer)[0][0].text == "<user>1+1=</user><assistant>"
    assert load(path, chat_tokenizer, template="plain")[0][0].text == "1+1="


def test_load_prompts_messages_without_template_are_joined(tmp_path, tokenizer):
    path = jsonl(tmp_path, [VERL])
    assert load(path, tokenizer, plain_template="{prompt}\n")[0][0].text == "Be terse.\n\n1+1?\n"
    with pytest.raises(ConfigError, match=r"data\.template=chat"):
        load(path, tokenizer, template="chat")
    with pytest.raises(ConfigError, match=r"data\.plain_template has no \{prompt\}"):
        load(path, tokenizer, plain_template="Q:")


def test_load_prompts_adds_bos_but_no_eos(tmp_path, bos_tokenizer_file):
    tokenizer = load_tokenizer(bos_tokenizer_file)
    assert len(tokenizer("1+1=")["input_ids"]) == 6  # by default the tokenizer adds both
    ids = load(jsonl(tmp_path, PLAIN), tokenizer)[0][0].token_ids
    assert tokenizer.decode(ids) == "<s>1+1="


def test_load_prompts_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"question": "x" * n, "answer": str(n)} for n in (5, 9, 8, 20)]
    prompts, report = load(jsonl(tmp_path, rows), tokenizer, limit=8)
    assert [prompts[i].ground_truth for i in range(len(prompts))] == ["5", "8"]
    assert (report.kept, report.dropped, report.longest_tokens) == (2, 2, 20)
    assert "2 dropped (longer than rollout.max_prompt_tokens=8)" in str(report)
    with pytest.raises(DataError, match=r"data\.val: all 4 .*=4 \(5 to 20 tokens\); raise rollout\.max_prompt_tokens"):
        load(jsonl(tmp_path, rows), tokenizer, limit=4, key="data.val")


@pytest.mark.parametrize(
    ("how", "kept"),
    [("truncate_left", "3456789</user><assistant>"), ("truncate_right", "<user>0123456789</user><a")],
)
def test_load_prompts_truncates_after_chat_template(tmp_path, chat_tokenizer, how, kept):
    path = jsonl(tmp_path, [{"question": q, "answer": "a"} for q in ("0123456789", "1")])
    prompts, report = load(path, chat_tokenizer, limit=25, long_prompts=how)
    assert [prompts[i].text for i in range(2)] == [kept, "<user>1</user><assistant>"]  # the second has the exact limit
    assert [chat_tokenizer.decode(prompts[i].token_ids) for i in range(2)] == prompts.columns["text"]
    assert (report.kept, report.dropped, report.truncated, report.longest_tokens) == (2, 0, 1, 34)
    assert "1 truncated (longer than rollout.max_prompt_tokens=25)" in str(report)


@pytest.mark.parametrize(
    ("how", "kept", "dropped", "truncated"), [("drop", ["5", "6"], 2, 0), ("truncate_left", ["20", "5"], 0, 1)]
)
def test_load_prompts_max_prompts_counts_only_rows_until_then(tmp_path, tokenizer, how, kept, dropped, truncated):
    path = jsonl(tmp_path, [{"question": "x" * n, "answer": str(n)} for n in (20, 5, 6, 30)])
    limits, data = RolloutConfig(max_prompt_tokens=8), DataConfig(long_prompts=how)
    prompts, report = load_prompts(path, tokenizer, data, limits, max_prompts=2)
    assert (prompts.columns["ground_truth"], report.dropped, report.truncated) == (kept, dropped, truncated)


def test_prompt_set_pickles_and_take_renumbers(tmp_path, tokenizer):
    rows = [{"question": f"q{n}", "answer": str(n)} for n in range(10)]
    prompts = pickle.loads(pickle.dumps(load(jsonl(tmp_path, rows), tokenizer)[0]))
    some = prompts.take([7, 2])
    assert [(some[i].row, some[i].text) for i in range(2)] == [(0, "q7"), (1, "q2")]
    assert tokenizer.decode(some[1].token_ids) == "q2"
    with pytest.raises(IndexError):
        prompts[10]


GOOD = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ({"answer": "a"}, r"no prompt: its columns are answer; set data\.prompt_key"),
        ({"question": "q"}, r"no ground truth.*set data\.answer_key"),
        ({"question": "  ", "answer": "a"}, "the prompt is empty"),
        ({"prompt": [], "answer": "a"}, "the prompt is empty"),
        ({"prompt": 5, "answer": "a"}, "the prompt is int"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "`role` and `content`"),
        ({**GOOD, "reward_model": "rule"}, "reward_model is str"),
        ({**GOOD, "extra_info": []}, "extra_info is list"),
        ({**GOOD, "data_source": 3}, "data_source is int"),
    ],
)
def test_load_prompts_malformed_row_names_file_and_line(tmp_path, tokenizer, bad, message):
    path = jsonl(tmp_path, [GOOD, "", bad, GOOD])
    with pytest.raises(DataError, match=rf"data\.train: .*prompts\.jsonl, line 3.*{message}"):
        load(path, tokenizer)


def test_load_prompts_several_blocks_keep_order_and_rows(tmp_path, tokenizer):
    rows = [{"question": f"question {n}", "answer": str(n)} for n in range(2500)]
    prompts, _ = load(parquet(tmp_path, rows), tokenizer)
    assert prompts.columns["ground_truth"] == [str(n) for n in range(2500)]
    assert tokenizer.decode(prompts[2499].token_ids) == "question 2499"
    with pytest.raises(DataError, match=r"prompts\.parquet, row 2501 has no prompt"):
        load(parquet(tmp_path, [*rows, {"question": None, "answer": "a"}]), tokenizer)


def test_load_prompts_unusable_files_are_rejected(tmp_path, tokenizer):
    (tmp_path / "prompts.csv").write_text("question,answer\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
    torn = parquet(tmp_path, [GOOD])
    torn.write_bytes(torn.read_bytes()[:-20])
    for name, message in [
        ("missing.jsonl", "there is no file"),
        ("prompts.csv", "has no rows"),
        ("empty.jsonl", "has no rows"),
        ("bad.parquet", "not a readable parquet file"),
        ("prompts.parquet", "not a readable parquet file"),
    ]:
        with pytest.raises(DataError, match=rf"^data\.val: .*{name}.*{message}|^data\.val: {message}.*{name}"):
            load(tmp_path / name, tokenizer, key="data.val")


@pytest.mark.skipif(not SHARED_GSM8K.is_dir(), reason="GSM8K is not at hand")
def test_load_prompts_gsm8k_and_verl_copy_are_equal(tokenizer):
    plain, plain_report = load(SHARED_GSM8K / "test.jsonl", tokenizer, limit=4096)
    verl, verl_report = load(SHARED_GSM8K / "verl_format_test.parquet", tokenizer, limit=4096)
    assert plain_report.kept == verl_report.kept == 1319
    for a, b in zip(plain, verl, strict=True):
        assert b.text.startswith(a.text)
        assert a.ground_truth.split("#### ")[1].replace(",", "") == b.ground_truth
    assert tokenizer.decode(verl[1318].token_ids) == verl[1318].text


SYSTEM = "Be terse."


def test_load_prompts_system_prompt_with_both_templates(tmp_path, chat_tokenizer):
    path = jsonl(tmp_path, [PLAIN[0], VERL])
    prompts, _ = load(path, chat_tokenizer, system_prompt=SYSTEM)
    assert prompts[0].text == "<system>Be terse.</system><user>1+1=</user><assistant>"
    assert prompts[1].text == "<system>Be terse.</system><user>1+1?</user><assistant>"
    assert load(path, chat_tokenizer, system_prompt=SYSTEM, template="plain")[0][0].text == "Be terse.\n\n1+1="


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT_TEMPLATE.replace("'tool'", "'system'"), "rejects the prompt: no tools here; set data.system_prompt=null"),
        (CHAT_TEMPLATE.replace("in messages", "in messages if m.role != 'system'"), "does not write it"),
    ],
)
def test_load_prompts_template_without_system_is_rejected(tmp_path, chat_tokenizer, template, message):
    path = jsonl(tmp_path, PLAIN)
    chat_tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=rf"^data\.system_prompt: .*{message}"):
        load(path, chat_tokenizer, system_prompt=SYSTEM)
    assert len(load(path, chat_tokenizer)[0]) == 2


def test_load_prompts_several_files_form_one_counted_set(tmp_path, tokenizer):
    sizes = {"a": (5, 9, 8), "b": (20,), "c": (3, 4)}
    for name, lengths in sizes.items():
        rows = [{"question": "x" * n, "answer": f"{name}{n}"} for n in lengths]
        files.jsonl(tmp_path / f"{name}.jsonl", rows)
    names = [str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")]
    prompts, report = load(names, tokenizer, limit=8)
    assert prompts.columns["ground_truth"] == ["c3", "c4", "a5", "a8"]
    assert (report.of_files, report.dropped) == ((2, 2, 0), 2)
    assert str(report).startswith(f"data.train: 4 rows from 3 files ({tmp_path}/c.jsonl, ")
    assert report.notes == (f"no row kept of {tmp_path}/b.jsonl",)
    config = RolloutConfig(max_prompt_tokens=8)
    prompts, report = load_prompts(names, tokenizer, DataConfig(), config, max_prompts=3)
    assert (prompts.columns["ground_truth"], report.of_files) == (["c3", "c4", "a5"], (2, 1, 0))


def test_load_prompts_files_differ_in_columns_and_overrides(tmp_path, tokenizer):
    asked = {**VERL, "sampling": {"temperature": 0.5}, "max_turns": 2}
    names = [jsonl(tmp_path, PLAIN), parquet(tmp_path, [asked])]
    prompts, _ = load(names, tokenizer)
    assert [prompts[i].sampling for i in range(3)] == [None, None, {"temperature": 0.5}]
    assert prompts.take([2])[0].max_turns == 2
    assert pickle.loads(pickle.dumps(prompts))[2].sampling == {"temperature": 0.5}


def test_load_prompts_parquet_tool_calls_have_no_nulls(tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    calls = [[{"function": {"name": "look", "arguments": each}}] for each in ({"q": "a"}, {"n": 1})]
    turns = [{"role": "assistant", "content": None, "tool_calls": made} for made in calls]
    asked, answer = {"role": "user", "content": "?"}, {"role": "tool", "content": "42"}
    prompts, _ = load(parquet(tmp_path, [{**VERL, "prompt": [asked, turn, answer]} for turn in turns]), chat_tokenizer)
    assert "null" not in prompts[0].text
    called = [prompts[row].messages[1]["tool_calls"][0]["function"] for row in (0, 1)]
    assert called == [{"name": "look", "arguments": {"q": "a"}}, {"name": "look", "arguments": {"n": 1}}]


def test_load_prompts_message_rejected_by_template_names_line(tmp_path, chat_tokenizer):
    path = jsonl(tmp_path, [GOOD, {"prompt": [{"role": "tool", "content": "x"}], "answer": "a"}])
    with pytest.raises(DataError, match=r"line 2: the tokenizer's chat template rejects the prompt: no tools here"):
        load(path, chat_tokenizer)
    chat_tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    path = jsonl(tmp_path, [GOOD, {**VERL, "prompt": [{"role": "critic", "content": "no"}, *VERL["prompt"]]}])
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 2: .* drops or changes message 1 \(role 'critic'\)"):
        load(path, chat_tokenizer)


def test_load_prompts_other_template_arguments_are_rejected(tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[0].content }}{{ think }}"
    path = jsonl(tmp_path, [{**PLAIN[0], "chat_template_kwargs": {"think": 1}}])
    with pytest.raises(DataError, match=r"line 1 has chat_template_kwargs\.think=1, .* set data\.template_kwargs\.thi"):
        load(path, chat_tokenizer)
    assert load(path, chat_tokenizer, template_kwargs={"think": 1})[0][0].text == "1+1=1"
