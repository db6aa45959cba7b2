"""Trial of episodes, their tools and the chat template before a run starts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_rl.config import Config
from mcore_rl.config.rules.episodes import has_turns
from mcore_rl.data.chat.limits import check_limits
from mcore_rl.data.tokenizer import eos_token_ids
from mcore_rl.rollout.episodes.load import conversation_of, load_episode
from mcore_rl.rollout.tools.parsers import ToolCallParser
from mcore_rl.rollout.tools.toolbox import check_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_episode(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[dict[str, Any]], list[str]]:
    """Load the episode and its tools. Return the tool schemas for prompts, and notes about the rendering of turns.

    Raises: ConfigError for an episode, tool, parser or chat template that cannot be used.
    """
    rollout = config.rollout
    if not has_turns(rollout):
        return [], []
    load_episode(rollout)
    schemas = check_tools(rollout, config.sandbox)
    stop_ids = eos_token_ids(tokenizer, config.model.hf_path)
    load = partial(conversation_of, rollout, config.data.template_kwargs, tokenizer, schemas, stop_ids)
    check_limits(load, "model.tokenizer_path")
    _, facts = load()
    notes = []
    if schemas:
        ToolCallParser(rollout.tool_parser, str(tokenizer.chat_template), schemas)
        if not facts.parallel_calls:
            notes.append("rollout.tools: the chat template renders one call per turn; only the first one is executed")
    notes += [f"rollout.history={rollout.history}: {rewrite}" for rewrite in facts.rewrites]
    if facts.dated:
        notes.append(
            "the chat template writes today's date into prompts: they change if the run resumes on another day"
        )
    return schemas, notes
