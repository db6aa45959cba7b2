"""Inputs of a reward model: the trajectory's tokens with the policy's tokenizer, else the encoded conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from mcore_rl.config.schema import Config
from mcore_rl.data.loading import load_prompts
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.data.trajectories import take_rows
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rewards.model_inputs import RewardInputs
from mcore_rl.rollout.trajectories import pack_trajectories
from mcore_rl.types import Trajectory, TrajectoryBuffers

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OTHER_TEMPLATE = (
    "{% if messages[0].content == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
CHAT = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+2?"}]
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": CHAT, "answer": "4"}]
ANSWERS = [(1, "four"), (0, "zwei"), (1, "")]
PROMPT_ROWS = np.array([1, 0, 1])


def reward_inputs(config: Config) -> RewardInputs:
    return RewardInputs(config.reward_model, config.model, config.rollout)


def write_tokenizer(directory: Path, *, template: str | None, bos: bool = False, reverse: bool = False) -> Path:
    """Write a tokenizer with one token per byte, in either order; with `bos`, <s> precedes plain text."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    if bos:
        pair = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=pair)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def config_of(tmp_path: Path, *, model: dict[str, Any] | None = None, **tokenizer: Any) -> Config:
    """Return a configuration of a policy with chat template TEMPLATE and a reward model with the given tokenizer."""
    config = Config()
    config.model.hf_path = str(write_tokenizer(tmp_path / "policy", template=TEMPLATE))
    config.reward_model.hf_path = str(write_tokenizer(tmp_path / "judge", **tokenizer))
    described = {"vocab_size": 300, "max_position_embeddings": 2048} | (model or {})
    (tmp_path / "judge" / "config.json").write_text(json.dumps(described))
    return config


def prompts_of(config: Config, tmp_path: Path, rows: list[dict[str, Any]] | None = None) -> PromptSet:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    return load_prompts(path, load_tokenizer(config.model.hf_path), config.data, config.rollout)[0]


def trajectories(config: Config, prompts: PromptSet) -> TrajectoryBuffers:
    """Return ANSWERS packed like a rollout worker does; every response ends with the end token."""
    tokenizer = load_tokenizer(config.model.hf_path)
    made = []
    for row, text in ANSWERS:
        ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
        made.append(Trajectory(prompts[row].token_ids, ids, np.zeros(len(ids), np.float32), 0 * ids))
    return pack_trajectories(made)


def read(config: Config, tmp_path: Path, rows: list[int]) -> list[list[int]]:
    prompts = prompts_of(config, tmp_path)
    inputs = reward_inputs(config)
    inputs.check(prompts, "data.train")
    buffers = take_rows(trajectories(config, prompts), np.array(rows))
    found = inputs.of(buffers, PROMPT_ROWS[rows], prompts, "data.train")
    return [ids.tolist() for ids in found]


def test_with_the_policys_tokenizer_tokens_are_those_of_the_trajectory(tmp_path: Path) -> None:
    config = config_of(tmp_path, template=TEMPLATE)
    inputs = reward_inputs(config)
    assert not inputs.reencoded
    prompts = prompts_of(config, tmp_path)
    buffers = trajectories(config, prompts)
    first, second = inputs.of(take_rows(buffers, np.array([2, 1])), PROMPT_ROWS[[2, 1]], None, "data.train")
    end = load_tokenizer(config.model.hf_path).eos_token_id
    assert first.tolist() == [*prompts[1].token_ids.tolist(), end]
    assert second.tolist()[: len(prompts[0].token_ids)] == prompts[0].token_ids.tolist()


def test_a_token_that_only_the_policys_model_has_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, template=TEMPLATE)
    prompts = prompts_of(config, tmp_path)
    buffers = trajectories(config, prompts)
    buffers.tokens[buffers.token_offsets[2] - 1] = 300  # last token of the second response
    inputs = reward_inputs(config)
    inputs.of(take_rows(buffers, np.array([0, 2])), PROMPT_ROWS[[0, 2]], None, "data.train")
    with pytest.raises(DataError, match=r"data\.train, row 0: the response has token 300.*reward_model\.hf_path"):
        inputs.of(take_rows(buffers, np.array([0, 1])), PROMPT_ROWS[[0, 1]], None, "data.train")


@pytest.mark.parametrize("reverse", [False, True])
def test_another_template_renders_the_conversation_with_the_answer(tmp_path: Path, reverse: bool) -> None:
    config = config_of(tmp_path, template=OTHER_TEMPLATE, reverse=reverse)
    tokenizer = load_tokenizer(str(config.reward_model.hf_path))
    conversations = [
        [*CHAT, {"role": "assistant", "content": ""}],
        [*CHAT, {"role": "assistant", "content": "four"}],
    ]
    expected = [tokenizer.apply_chat_template(each, return_dict=False) for each in conversations]
    assert read(config, tmp_path, [2, 0]) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"template": OTHER_TEMPLATE}, "<s>user: 1+1=\nassistant: zwei\n"),
        ({"template": TEMPLATE, "reverse": True}, "[user]1+1=<end>[assistant]zwei<end>"),
        ({"template": None, "bos": True}, "<s>[user]1+1=<end>[assistant]zwei"),
    ],
)
def test_another_tokenizer_encodes_the_conversation_anew(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    config = config_of(tmp_path, **options)
    (found,) = read(config, tmp_path, [1])
    assert load_tokenizer(str(config.reward_model.hf_path)).decode(found) == text


def test_lengths_are_those_of_the_reward_models_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path, template=OTHER_TEMPLATE)
    longest = max(len(ids) for ids in read(config, tmp_path, [0, 1, 2]))
    prompts = prompts_of(config, tmp_path)
    config.reward_model.tokens_per_microbatch = longest
    reward_inputs(config).of(trajectories(config, prompts), PROMPT_ROWS, prompts, "data.val")
    config.reward_model.tokens_per_microbatch = longest - 1
    reward_inputs(config).check(prompts, "data.val")
    message = rf"data\.val, row 1: .* take {longest} tokens .* reward_model\.tokens_per_microbatch={longest - 1}; raise"
    with pytest.raises(DataError, match=message):
        reward_inputs(config).of(trajectories(config, prompts), PROMPT_ROWS, prompts, "data.val")
    config.reward_model.tokens_per_microbatch = 10
    with pytest.raises(DataError, match=r"data\.val, row 0: .*reward_model\.tokens_per_microbatch=10"):
        reward_inputs(config).check(prompts, "data.val")


def test_positions_of_the_reward_model_are_a_limit_as_well(tmp_path: Path) -> None:
    config = config_of(tmp_path, template=OTHER_TEMPLATE, model={"max_position_embeddings": 20})
    with pytest.raises(DataError, match=r"data\.train, row 0.*max_position_embeddings=20; lower rollout"):
        read(config, tmp_path, [0])


def test_a_conversation_that_the_template_refuses_is_found_before_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, template=OTHER_TEMPLATE)
    prompts = prompts_of(config, tmp_path, [*ROWS, {"prompt": "no", "answer": ""}])
    with pytest.raises(DataError, match=r"data\.val, row 2: reward_model.*chat template rejects.*not this one"):
        reward_inputs(config).check(prompts, "data.val")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"vocab_size": 258},
            r"^reward_model\.hf_path=.*: the tokenizer has 259 tokens but the model has vocab_size=258",
        ),
        ({"max_position_embeddings": 1023}, r"= 1024 exceeds max_position_embeddings=1023 of reward_model\.hf_path="),
    ],
)
def test_a_model_too_small_for_its_tokens_is_refused(tmp_path: Path, model: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_inputs(config_of(tmp_path, template=TEMPLATE, model=model))


def test_a_reward_model_without_a_tokenizer_is_refused_by_its_key(tmp_path: Path) -> None:
    config = config_of(tmp_path, template=TEMPLATE)
    config.reward_model.hf_path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"^reward_model\.hf_path: .* contains no tokenizer"):
        reward_inputs(config)
