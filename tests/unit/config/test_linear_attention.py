"""Settings that engines do not support for models with linear attention."""

from __future__ import annotations

import pytest

from mcore_rl.config.roles import EngineRole
from mcore_rl.config.rules.linear_attention import check_linear_attention
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError

HYBRID = {"model_type": "qwen3_next", "linear_num_key_heads": 16}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("engine", "sglang", r"^rollout\.engine=sglang: weights of .* can be sent to vLLM only; set it to vllm$"),
        ("quantization", "fp8", r"^rollout\.quantization=fp8: .*; set it to none$"),
        ("draft", "ngram", r"^rollout\.draft=ngram: .*; set it to none$"),
    ],
)
def test_check_linear_attention_unsupported_key_is_rejected(key: str, value: object, said: str) -> None:
    config = Config()
    setattr(config.rollout, key, value)
    role = EngineRole.rollout(config.rollout, config.model)
    check_linear_attention(role, {"model_type": "qwen3"}, cuda=True)
    with pytest.raises(ConfigError, match=said):
        check_linear_attention(role, HYBRID, cuda=True)


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_check_linear_attention_other_dtype_on_cpu_is_rejected(dtype: str) -> None:
    config = Config()
    config.model.dtype = dtype
    role = EngineRole.rollout(config.rollout, config.model)
    check_linear_attention(role, HYBRID, cuda=True)
    with pytest.raises(ConfigError, match=rf"^model\.dtype={dtype}: vLLM's CPU kernels .* set model\.dtype=bfloat16$"):
        check_linear_attention(role, HYBRID, cuda=False)
    config.model.dtype = "bfloat16"
    check_linear_attention(role, HYBRID, cuda=False)


@pytest.mark.parametrize(("own", "set_key"), [("float32", r"judge\.dtype=float32"), (None, r"model\.dtype=auto")])
def test_check_linear_attention_of_a_judge_names_the_set_key(own: str | None, set_key: str) -> None:
    config = Config()
    config.judge.hf_path, config.judge.dtype = "y", own
    role = EngineRole.judge(config.judge, config.rollout, config.model)
    with pytest.raises(ConfigError, match=rf"^{set_key}: vLLM's CPU kernels .* set judge\.dtype=bfloat16$"):
        check_linear_attention(role, HYBRID, cuda=False)
