import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.errors import ConfigError

SHARED_GPT2 = Path(__file__).parents[4] / "shared" / "data" / "tokenizers" / "gpt2"


def write(path: Path, **values) -> None:
    path.write_text(json.dumps(values))


def test_load_tokenizer_single_file_matches_library_and_gpt2_eos(tokenizer_file):
    bare = tokenizer_file.rename(tokenizer_file.parent / "some_name.json")
    tokenizer = load_tokenizer(bare)
    text = "Zoë paid $12.\n#### 12"
    assert tokenizer(text)["input_ids"] == Tokenizer.from_file(str(bare)).encode(text).ids
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert eos_token_ids(tokenizer, bare) == (256,)


def test_load_tokenizer_config_eos_precedes_known_names(tokenizer_file):
    assert load_tokenizer(tokenizer_file.parent).eos_token_id == 256
    write(tokenizer_file.parent / "config.json", model_type="qwen3", eos_token_id=33)
    assert load_tokenizer(tokenizer_file.parent).eos_token_id == 33
    write(tokenizer_file.parent / "generation_config.json", eos_token_id=[44, 33])
    tokenizer = load_tokenizer(tokenizer_file.parent)
    assert tokenizer.eos_token_id == 44
    assert eos_token_ids(tokenizer, tokenizer_file.parent) == (44, 33)


def test_load_tokenizer_directory_keeps_eos_and_chat_template(tokenizer_file):
    template = "{{ messages[0].content }}"
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!", "chat_template": template}
    write(tokenizer_file.parent / "tokenizer_config.json", **values)
    write(tokenizer_file.parent / "generation_config.json", eos_token_id=256)
    for path in (tokenizer_file, tokenizer_file.parent):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.eos_token, tokenizer.chat_template) == ("!", template)
        assert eos_token_ids(tokenizer, tokenizer_file.parent) == (tokenizer.convert_tokens_to_ids("!"), 256)


def test_load_tokenizer_without_eos_or_file_is_rejected(tokenizer_file, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path.*contains no tokenizer"):
        load_tokenizer(tmp_path)
    content = tokenizer_file.read_text().replace("<|endoftext|>", "<|stop|>")
    tokenizer_file.write_text(content)
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path.*no end-of-sequence token"):
        load_tokenizer(tokenizer_file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no"),
        ("{", "cannot be read: Expecting"),
        ("[" * 100_000, "cannot be read: maximum recursion"),
        ("[]", "must hold a JSON object"),
        ('{"model": {"type": "Unheard"}}', "not a readable tokenizer"),
    ],
)
def test_load_tokenizer_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"model.tokenizer_path.*{message}"):
        load_tokenizer(path)


@pytest.mark.skipif(not SHARED_GPT2.is_dir(), reason="GPT-2's tokenizer file is not at hand")
def test_load_tokenizer_gpt2_file():
    tokenizer = load_tokenizer(SHARED_GPT2 / "tokenizer.json")
    assert tokenizer.eos_token_id == 50256
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]


def test_load_tokenizer_in_new_process_defers_import_of_generation(tokenizer_file):
    """Models with code of their own get transformers' mixin all the same."""
    write(tokenizer_file.parent / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="!")
    code = f"""
import sys
from mcore_rl.data.tokenizer import load_tokenizer
load_tokenizer({str(tokenizer_file.parent)!r})
print("transformers.generation.utils" in sys.modules)
import torch
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
class Remote(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...
changed = add_generation_mixin_to_remote_model(Remote)
from transformers import GenerationMixin
print(issubclass(changed, GenerationMixin))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
