"""Teachers that cannot be used are rejected before a process starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import tiny_fields, write_tiny_model
from tiny_tokenizer import MODEL

from mcore_rl.algorithms import estimator
from mcore_rl.config.models import ActorConfig, ParallelConfig, TeacherConfig, TeacherSourceConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from mcore_rl.data.prompts import prompt_set
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engines.server.interfaces import ServerAnswer
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.preparation.teacher import check_row_temperatures, check_teacher, check_vocabulary
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.teacher import resolved_teacher, teacher_on_own_ranks
from mcore_rl.types import Prompt, TokenScores, TokenSequence
from model_converters.dcp.convert import to_mcore
from model_converters.hf.side_files import HF_FOLDER
from model_converters.mapping.layout import TrainLayout
from tests.unit.user_losses import write_text_loss


def write_config(directory: Path, kind: str, **changes: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_fields(kind, **changes)))
    return str(directory)


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer of configs/models/gsm8k_tiny. Training it takes a second."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)


def run_of(tmp_path: Path, policy: str, teacher: str, ranks: int, changes: dict[str, Any], **parallel: int) -> Config:
    config = Config()
    config.model = ModelConfig(hf_path=write_config(tmp_path / "policy", policy), dtype="float32")
    config.teacher.hf_path = write_config(tmp_path / "teacher", teacher, **changes)
    config.actor = ActorConfig(parallel=ParallelConfig(**parallel), num_ranks=ranks)
    return config


def policy_of(config: Config) -> ResolvedModel:
    return ResolvedModel.policy(ModelRole.policy(config.actor, config.model), config.num_trainer_ranks)


def test_teacher_without_experts_joins_expert_parallel_ranks(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3_moe", "qwen3", 4, {}, tp=2, ep=2)
    policy = policy_of(config)
    spec = resolved_teacher(config.teacher, config.teacher.entries[0], policy)
    assert (policy.layout.ep, spec.layout.ep) == (2, 1)
    # The same place in every group that the teacher uses.
    for rank in range(4):
        ours, theirs = (layout.coordinates(rank) for layout in (policy.layout, spec.layout))
        assert (ours.tp, ours.pp, ours.dp, ours.cp) == (theirs.tp, theirs.pp, theirs.dp, theirs.cp)


@pytest.mark.parametrize(
    ("kinds", "changes", "parallel", "teacher", "message"),
    [
        (
            ("qwen3", "qwen3"),
            {"num_hidden_layers": 3},
            {"pp": 2},
            {},
            r"does not fit the layout of the actor.*parallel",
        ),
        (
            ("qwen3", "qwen3"),
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {"tp": 2},
            {},
            r"does not fit.*actor\.parallel\.tp=2",
        ),
        (
            ("qwen3_moe", "qwen3_moe"),
            {"num_experts": 7},
            {"ep": 2},
            {},
            r"does not fit.*actor\.parallel\.ep=2 does not",
        ),
        (
            ("qwen3", "qwen3"),
            {"vocab_size": 64},
            {},
            {},
            r"has vocab_size 64 in config\.json, and the policy \d+: tokens",
        ),
        (
            ("qwen3", "qwen3"),
            {"vocab_size": 640},
            {},
            {"in_loss": 0.1},
            r"teacher\.in_loss=0\.1 compares.*vocab_size 640",
        ),
        (("qwen3", "qwen3_vl"), {}, {}, {}, r"^teacher\.hf_path=.*: the teacher has a vision tower"),
        (("qwen3_vl", "qwen3"), {}, {}, {}, r"^teacher\.hf_path=.*: model\.hf_path has a vision tower"),
        (
            ("qwen3_moe", "gpt_oss"),
            {},
            {"tp": 2},
            {},
            r"divided over 1 ranks, .* groups of 2; set actor.parallel.etp=1",
        ),
        (("qwen3", "qwen3"), {}, {}, {"in_loss": 0.1, "top_k": 9999}, r"^teacher\.top_k=9999 must be below the \d+"),
    ],
)
def test_resolved_teacher_that_does_not_fit_is_rejected(
    tmp_path: Path,
    kinds: tuple[str, str],
    changes: dict[str, Any],
    parallel: dict[str, int],
    teacher: dict[str, Any],
    message: str,
) -> None:
    config = run_of(tmp_path, *kinds, 2, changes, **parallel)
    for name, value in teacher.items():
        setattr(config.teacher, name, value)
    with pytest.raises(ConfigError, match=message) as raised:
        resolved_teacher(config.teacher, config.teacher.entries[0], policy_of(config))
    assert "teacher." in str(raised.value)


def test_resolved_teacher_with_more_padding_rows_passes_without_kl(tmp_path: Path) -> None:
    """Checkpoints of one tokenizer differ in the rows of their embeddings, such as those of Qwen2.5."""
    config = run_of(tmp_path, "qwen3", "qwen3", 1, {"vocab_size": 640})
    assert resolved_teacher(config.teacher, config.teacher.entries[0], policy_of(config)).arguments.vocab_size == 640


def test_teacher_on_own_ranks_has_its_own_layout(tmp_path: Path) -> None:
    """The actor's layout could not divide this teacher: 3 layers in 2 stages, 3 heads on 2 ranks."""
    config = run_of(tmp_path, "qwen3", "qwen3", 4, {}, pp=2, tp=2)
    config.rollout = RolloutConfig(max_prompt_tokens=32, max_response_tokens=32)
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
    config.teacher.hf_path = str(write_tiny_model(tmp_path / "other", "qwen3", **sizes))
    config.teacher.num_ranks, config.teacher.parallel = 3, ParallelConfig(tp=3)
    (layout,) = check_teacher(config, policy_of(config), estimator("grpo"))
    assert (layout.world_size, layout.tp, layout.pp, layout.dp) == (3, 3, 1, 1)
    config.teacher.parallel = ParallelConfig(pp=2)
    config.teacher.num_ranks = 2
    with pytest.raises(ConfigError, match=r"teacher\.parallel") as raised:
        check_teacher(config, policy_of(config), estimator("grpo"))
    assert "actor." not in str(raised.value)
    config.teacher.parallel, config.teacher.hf_path = ParallelConfig(), str(tmp_path / "teacher")
    config.teacher.in_loss, config.teacher.top_k = 1.0, 9999
    with pytest.raises(ConfigError, match=r"^teacher\.top_k=9999 must be below"):
        check_teacher(config, policy_of(config), estimator("grpo"))


def test_teachers_with_and_without_experts_have_ranks_in_one_run(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3", "qwen3", 4, {})
    experts = write_config(tmp_path / "experts", "qwen3_moe")
    config.teacher.num_ranks, config.teacher.parallel = 4, ParallelConfig(tp=2, ep=2)
    (dense,) = config.teacher.entries
    with pytest.raises(ConfigError, match=r"^teacher\.parallel\.ep=2, but the model has no experts; set it to 1"):
        teacher_on_own_ranks(config, dense)
    config.teacher.by_source = [TeacherSourceConfig("math", hf_path=experts)]
    layouts = [teacher_on_own_ranks(config, entry).layout for entry in config.teacher.entries]
    assert [(layout.ep, layout.tp, layout.dp) for layout in layouts] == [(1, 2, 2), (2, 2, 2)]


def test_check_teacher_alone_with_critic_is_rejected(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3", "qwen3", 1, {})
    config.teacher.alone, config.algorithm.advantage = True, "gae"
    with pytest.raises(ConfigError, match=r"^teacher\.alone=true drops the advantages of algorithm\.advantage=gae"):
        check_teacher(config, policy_of(config), estimator("gae"))


def test_check_vocabulary_names_the_first_other_token(tmp_path: Path) -> None:
    for name in ("policy", "same", "other"):
        write_tokenizer(tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path / "policy"))
    config: Any = SimpleNamespace(teacher=Config().teacher)
    check_vocabulary(config, tokenizer)
    config.teacher.hf_path = str(tmp_path / "same")
    check_vocabulary(config, tokenizer)
    config.teacher.hf_path = str(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"^teacher\.hf_path=.*another vocabulary than the policy: 2 tokens differ"
    ) as e:
        check_vocabulary(config, tokenizer)
    ids = tokenizer.get_vocab()
    assert f"such as {first!r} with id {ids[first]} for the policy and id {ids[second]} for the teacher" in str(e.value)


def test_check_vocabulary_without_tokenizer_names_the_key(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "policy")
    config: Any = SimpleNamespace(teacher=Config().teacher)
    config.teacher.hf_path = write_config(tmp_path / "teacher", "qwen3")
    with pytest.raises(ConfigError, match=r"^teacher\.hf_path: .* contains no tokenizer"):
        check_vocabulary(config, load_tokenizer(str(tmp_path / "policy")))


class _Scorer:
    """Fake ServerScorer. texts: by token; None for tokens without text."""

    def __init__(self, texts: dict[int, str | None], logp: float = -1.0) -> None:
        self.texts, self.logp, self.sent, self.lengths = texts, logp, list[int](), list[int]()
        self.config = self.entry = SimpleNamespace(top_k=0, given="teacher.url=http://a")
        self.model = "m"

    def ask(self, sequence: TokenSequence) -> ServerAnswer:
        ids = sequence.token_ids[sequence.start :].tolist()
        self.sent += ids
        self.lengths.append(len(sequence.token_ids))
        return ServerAnswer(TokenScores(np.full(len(ids), self.logp)), [self.texts[token] for token in ids])


def served_config(tokenizer_path: str | None = None) -> Any:
    section = TeacherConfig(url="http://a", in_advantage=1.0, tokenizer_path=tokenizer_path)
    rollout = RolloutConfig(max_prompt_tokens=8, max_response_tokens=12)
    return SimpleNamespace(teacher=section, rollout=rollout, data=DataConfig())


@pytest.mark.parametrize(
    ("changes", "limit", "message"),
    [
        ({}, 21, None),
        ({}, None, None),
        ({}, 20, r"up to 20 tokens, and rollout\.max_prompt_tokens \+ rollout\.max_response_tokens \+ 1 = 21"),
        ({"one": "?"}, None, r"has another vocabulary than the policy: token \d+ is '\S+' for the policy and '\?' for"),
        ({"all": None}, None, r"returns no texts of tokens, .*set teacher\.tokenizer_path"),
        ({"logp": float("nan")}, None, r"log-probabilities of tokens \d+ to \d+ that are not finite"),
    ],
)
def test_check_vocabulary_probes_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], limit: int | None, message: str | None
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    texts: dict[int, str | None] = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    if "all" in changes:
        texts = dict.fromkeys(texts)
    if "one" in changes:
        texts[5] = "?"  # the second token that is sent
    scorer = _Scorer(texts, changes.get("logp", -1.0))
    monkeypatch.setattr("mcore_rl.preparation.teacher.connect", lambda *given: scorer)
    monkeypatch.setattr("mcore_rl.preparation.teacher.token_limit", lambda it: limit)
    monkeypatch.setattr("mcore_rl.preparation.teacher.try_server", lambda it, sequence, k: it.ask(sequence))
    config = served_config()
    if message is None:
        check_vocabulary(config, tokenizer)
        # From the whole vocabulary, in pieces that the server can read.
        assert (len(scorer.sent), scorer.sent[0], scorer.sent[-1]) == (256, 0, len(tokenizer) - 1)
        assert max(scorer.lengths) <= 20
        return
    with pytest.raises(ConfigError, match=rf"^teacher\.url=http://a.*{message}"):
        check_vocabulary(config, tokenizer)


def test_check_vocabulary_of_a_server_by_its_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "policy")
    write_tokenizer(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"seven"', 1))
    with pytest.raises(ConfigError, match=r"^teacher\.tokenizer_path=\S+ has another vocabulary"):
        check_vocabulary(served_config(str(tmp_path / "other")), load_tokenizer(str(tmp_path / "policy")))


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({}, {}, None),
        ({"vocab_size": 64}, {}, r"^teacher\.hf_path=\S+ has vocab_size 64"),
        ({}, {"tp": 3}, r"^teacher\.tp=3 must divide the model's 4 attention heads"),
        (
            {"max_position_embeddings": 64},
            {},
            r"^rollout\.max_prompt_tokens \+ .* = 65 exceeds teacher\.hf_path's \(vLLM",
        ),
        ({}, {"in_loss": 1.0, "top_k": 9999}, r"^teacher\.top_k=9999 must be below"),
    ],
)
def test_check_teacher_on_engines_reads_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keys: dict[str, Any], message: str | None
) -> None:
    monkeypatch.setattr("mcore_rl.preparation.teacher.check_weights", lambda role: 0)
    config = run_of(tmp_path, "qwen3", "qwen3", 1, changes)
    for name, value in {"num_engines": 1, **keys}.items():
        setattr(config.teacher, name, value)
    config.cluster.device, config.rollout = "cpu", RolloutConfig(max_prompt_tokens=32, max_response_tokens=32)
    config.model.float32_router = True  # has no effect on a teacher without experts
    policy = policy_of(config)
    if message is None:
        check_teacher(config, policy, estimator("grpo"))
        return
    with pytest.raises(ConfigError, match=message):
        check_teacher(config, policy, estimator("grpo"))


def test_check_teacher_by_source_requires_sampled_responses(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3", "qwen3", 1, {})
    config.rollout = RolloutConfig(max_prompt_tokens=32, max_response_tokens=32)
    config.teacher = TeacherConfig(in_advantage=1.0, by_source=[TeacherSourceConfig("a", moving_average=0.5)])
    policy = policy_of(config)
    check_teacher(config, policy, estimator("grpo"))
    config.algorithm.policy_loss.name = write_text_loss(tmp_path)
    with pytest.raises(ConfigError, match=r"^teacher\.by_source has no effect: .*:likelihood has no advantages"):
        check_teacher(config, policy, estimator("grpo"))


@pytest.mark.parametrize(
    ("section", "rejected"),
    [
        ({"url": "http://a"}, True),
        ({"hf_path": "/a", "num_engines": 1}, True),
        ({"hf_path": "/a"}, False),
        ({}, False),
        ({"by_source": [TeacherSourceConfig("hot", url="http://a")]}, True),
        ({"by_source": [TeacherSourceConfig("cold", url="http://a")]}, False),
    ],
)
def test_check_row_temperatures_names_the_row(section: dict[str, Any], rejected: bool) -> None:
    samplings: list[Any] = [None, {"temperature": 1.0}, {"top_p": 1.0}, {"temperature": 0.7}]
    rows = [
        Prompt(row, np.array([1], np.int32), f"text {row}", "hot" if row == 3 else "cold", "", sampling=sampling)
        for row, sampling in enumerate(samplings)
    ]
    if not rejected:
        check_row_temperatures(TeacherConfig(**section), prompt_set(rows))
        return
    with pytest.raises(DataError, match=r"^data\.train: row 3 .*'text 3'\): sampling\.temperature is 0\.7, and teach"):
        check_row_temperatures(TeacherConfig(**section), prompt_set(rows))


def test_check_teacher_reads_a_megatron_checkpoint(tmp_path: Path) -> None:
    config = run_of(tmp_path, "qwen3", "qwen3", 1, {})
    write_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    to_mcore(tmp_path / "model", tmp_path / "step_1", TrainLayout(1))
    config.teacher.hf_path, config.teacher.checkpoint = None, str(tmp_path / "step_1")
    config.cluster.device, config.rollout = "cpu", RolloutConfig(max_prompt_tokens=32, max_response_tokens=32)
    policy = policy_of(config)
    check_teacher(config, policy, estimator("grpo"))
    file = tmp_path / "step_1" / HF_FOLDER / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"num_hidden_layers": 4}))
    with pytest.raises(
        ConfigError, match=r"^teacher\.checkpoint=\S+step_1: .* does not contain this model: .*in the model"
    ):
        check_teacher(config, policy, estimator("grpo"))
    config.teacher.checkpoint = str(tmp_path)
    with pytest.raises(ConfigError, match=r"^teacher\.checkpoint=\S+: no config\.json there"):
        check_teacher(config, policy, estimator("grpo"))
