"""Settings that prompts with images do not support are rejected; the same settings without images are accepted."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.config.schema import Config
from mcore_rl.data.prompts import PromptSet
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.images import check_images
from tests.vision_models import png


def prompts(*images: tuple[bytes, ...]) -> PromptSet:
    tokens = np.arange(len(images), dtype=np.int32)
    return PromptSet(tokens, np.arange(len(images) + 1), {"images": list(images)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout.draft": "ngram"}, r"rollout\.draft=ngram: 1 prompts of data\.val have images; set it to none"),
        ({"reward_model.hf_path": "judge"}, r"reward_model\.hf_path: .* read texts; set it to null"),
        (
            {"rollout.tools": "tools.py:TOOLS", "rollout.long_history": "drop_turns"},
            r"rollout\.long_history=drop_turns: .* set it to end",
        ),
        (
            {"rollout.tools": "tools.py:TOOLS", "rollout.history": "new_sequence"},
            r"rollout\.history=new_sequence: .* set it to keep",
        ),
    ],
)
def test_check_images_unsupported_setting_names_its_key(keys: dict[str, object], message: str) -> None:
    config = Config()
    for name, value in keys.items():
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key)
        setattr(getattr(config, section), key, value)
    check_images(config, "data.val", prompts((), ()))
    with pytest.raises(ConfigError, match=message):
        check_images(config, "data.val", prompts((), (png(8, 8),)))


def test_check_images_supported_settings_pass() -> None:
    check_images(Config(), "data.train", prompts((png(8, 8),)))
