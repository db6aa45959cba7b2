"""Loading of the configured episode, and of the objects that an engine's episodes share."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.config.episodes import WITH_ENVIRONMENT, WITH_GATEWAY, WITH_TOOLS
from mcore_rl.config.functions import check_call, load_function
from mcore_rl.config.rules.images import WithoutImages
from mcore_rl.config.rules.rollout import episode_of
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.data.chat.template import TemplateFacts, examine, image_fault
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.episodes.builtin import EnvironmentEpisode, Episode, ToolEpisode
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.images import ToolImages
from mcore_rl.rollout.episodes.player import EpisodePlayer
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.episodes.trace import Record
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.membership import GatewayMembership
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.rollout.tools.parsers import ToolCallParser
from mcore_rl.rollout.tools.toolbox import ToolBox
from mcore_rl.types.chat import ToolSchema
from mcore_rl.vision.processor import ImageProcessor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "rollout.episode"
FORM = "async def run(self, session, prompt)"


@dataclass(frozen=True)
class FunctionEpisode:
    """Episode implemented by a user's async function."""

    function: Callable[..., Awaitable[object]]
    options: Mapping[str, object]

    async def run(self, session: Session, prompt: EpisodePrompt) -> object:
        return await self.function(session, prompt, **self.options)


def load_episode(rollout: RolloutConfig) -> Episode:
    """Load the multi-turn episode that the configuration selects.

    Raises: ConfigError naming rollout.episode or rollout.environment, and the cause.
    """
    chosen, options = episode_of(rollout), dict(rollout.episode_kwargs)
    if chosen == WITH_TOOLS:
        return ToolEpisode()
    if chosen in WITH_GATEWAY:
        return GatewayEpisode(rollout)
    if chosen == WITH_ENVIRONMENT:
        assert rollout.environment is not None
        return EnvironmentEpisode(rollout.environment, options)
    named: Any = load_function(KEY, chosen, may_be_async=True)
    origin = f"{KEY}={chosen}"
    if not inspect.isclass(named):
        # All episodes of an engine share one thread: a plain function would block the others.
        if not inspect.iscoroutinefunction(named):
            raise ConfigError(f"{origin} must be a class with {FORM}, or async def {named.__name__}(session, prompt)")
        check_call(origin, named, ("session", "prompt"), options, "f(session, prompt, **rollout.episode_kwargs)")
        return FunctionEpisode(named, options)
    # Checked before the run, because otherwise every episode would fail with the same TypeError.
    check_call(origin, named, (), options, "a class with rollout.episode_kwargs")
    if not inspect.iscoroutinefunction(getattr(named, "run", None)):
        raise ConfigError(f"{origin} has no {FORM}")
    made: Any = named(**options)
    return made


def start_episodes(
    rollout: RolloutConfig,
    sandbox: SandboxConfig,
    loop: EngineLoop,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...],
    *,
    template_kwargs: dict[str, object],
    record: Record,
    images: ImageProcessor | None = None,
    without_images: WithoutImages | None = None,
    gateway: GatewayMembership,
) -> EpisodePlayer:
    """Start the player for the configured episodes on an engine, and their tools. `template_kwargs`:
    data.template_kwargs. `record` receives spans for the timeline. `images`, `without_images`: see tool_images.
    `gateway`: membership of the engine, for rollout.episode=gateway.

    Raises: ConfigError if something cannot be loaded or rendered.
    """
    episode = load_episode(rollout)
    player = EpisodePlayer(episode, loop, rollout, record)
    if isinstance(episode, GatewayEpisode):
        gateway.set_episode(player, episode)
    # Started on the episodes' thread, which outlives the tool processes and makes all calls.
    tools = player.run(ToolBox.start(rollout, sandbox)) if rollout.tools is not None else None
    schemas = tools.schemas if tools is not None else []
    conversation, facts = conversation_of(rollout, template_kwargs, tokenizer, schemas, stop_ids)

    def parser_of(schemas: Sequence[ToolSchema]) -> ToolCallParser:
        return ToolCallParser(rollout.tool_parser, str(tokenizer.chat_template), [dict(schema) for schema in schemas])

    # Programs behind the gateway bring their own tools.
    parser = parser_of if schemas or isinstance(episode, GatewayEpisode) else None
    player.context = EpisodeContext(
        tokenizer,
        conversation,
        tools,
        facts.parallel_calls,
        frozenset(stop_ids),
        parser_of=parser,
        images=tool_images(conversation, images, without_images),
        prepare_format=loop.engine.prepare_format,
    )
    return player


def tool_images(
    conversation: Conversation, processor: ImageProcessor | None, without_images: WithoutImages | None
) -> ToolImages:
    """Return the support for images in answers of tools.

    processor: image processor of a model that reads images, None for another model. without_images: setting that does
    not support images.
    """
    if processor is None:
        return ToolImages()
    if without_images is not None:
        reason = f" ({without_images.reason})" if without_images.reason else ""
        return ToolImages(fault=f"{without_images.setting} does not support them{reason}; {without_images.remedy}")
    return ToolImages(processor, image_fault(conversation, processor.text))


def conversation_of(
    rollout: RolloutConfig,
    template_kwargs: dict[str, object],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema],
    stop_ids: tuple[int, ...],
) -> tuple[Conversation, TemplateFacts]:
    """Return the renderer of turns and the properties of the chat template.

    Raises: ConfigError if the template cannot render tools or users, or rewrites earlier turns while rollout.history is
    null.
    """
    conversation = Conversation(tokenizer, tools, stop_ids, template_kwargs)
    facts = examine(conversation, tools=bool(tools), users=episode_of(rollout) in (WITH_ENVIRONMENT, *WITH_GATEWAY))
    if facts.rewrites and rollout.history is None:
        raise ConfigError(
            "rollout.history: the chat template renders earlier turns differently once a message follows: "
            f"{'; '.join(facts.rewrites)}. Set it to keep (train on the sampled tokens, one sequence per episode) or "
            "to new_sequence (render the conversation again for each turn, as in deployment)"
        )
    return conversation, facts
