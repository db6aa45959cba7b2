"""Data types shared by the packages: rollout data, batches, checkpoints, metrics."""

from mcore_rl.types.batch import Batch, RankShare, RankShares
from mcore_rl.types.data import (
    BuffersRef,
    Completion,
    Delta,
    GenerationRequest,
    Grades,
    Prompt,
    RolloutScalars,
    SamplingOptions,
    SamplingOverrides,
    Score,
    Span,
    Spans,
    TrajectoryBuffers,
)
from mcore_rl.types.device import DeviceMemory
from mcore_rl.types.drafts import DraftCounts
from mcore_rl.types.json_format import JsonFormat
from mcore_rl.types.metrics import (
    Correlation,
    Deviation,
    EffectiveFraction,
    ExplainedVariance,
    LogpGap,
    Max,
    Mean,
    Metric,
    Min,
    Quantile,
    Root,
    Total,
    merge_metrics,
)
from mcore_rl.types.rollout import (
    NOT_SAMPLED,
    BatchHandle,
    EpisodeOutcome,
    Groups,
    RolloutResult,
    RolloutTask,
    ScoreRefs,
    TokenRefs,
    Trajectory,
    extra_of_turns,
)
from mcore_rl.types.saved import SavedFile, SavedState
from mcore_rl.types.sequences import SequenceLogp, SequenceSums
from mcore_rl.types.token_column import TokenColumn
from mcore_rl.types.token_scores import ScoreColumn, TokenScores, TokenSequence
from mcore_rl.types.token_sets import TokenSets
from mcore_rl.types.vision import NO_IMAGES, ImageSource, ProcessedImage, PromptImages
