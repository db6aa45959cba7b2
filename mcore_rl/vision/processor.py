"""Image processor of a model: encoded images to the patches that the vision tower reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mcore_rl.config.reading.json_files import read_json_object
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types.vision import ImageSource, ProcessedImage, PromptImages
from mcore_rl.vision.placeholders import image_starts
from mcore_rl.vision.sources import TOOL_FORMATS, image_size, read_image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("preprocessor_config.json", "processor_config.json")


class _Processor(Protocol):
    """transformers' image processors of the Qwen-VL families."""

    merge_size: int

    def get_number_of_image_patches(self, height: int, width: int) -> int: ...

    def preprocess(self, images: Sequence[object], *, return_tensors: str) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class ImageProcessor:
    """Image processor of the model in a directory.

    image_token: id of the placeholder of a feature.
    text: text of one image in a prompt, with a single placeholder.
    """

    image_token: int
    text: str
    _processor: _Processor

    @classmethod
    def load(cls, model_dir: str | Path, tokenizer: PreTrainedTokenizerBase, key: str) -> ImageProcessor:
        """Load the processor.

        Raises: ConfigError naming `key` for a directory without its files, or a tokenizer without its tokens.
        """
        directory = Path(model_dir)
        if not any((directory / name).is_file() for name in _FILES):
            raise ConfigError(
                f"{key}: {directory} has no {' or '.join(_FILES)}, with which images are processed; copy it from the "
                "model's release"
            )
        config = read_json_object(directory / "config.json", key)
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        ids = [config.get(name) for name in names]
        tokens = tokenizer.convert_ids_to_tokens([number for number in ids if isinstance(number, int)])
        if len(tokens) != len(names) or None in tokens:
            raise ConfigError(
                f"{key}: {directory}/config.json needs {', '.join(names)}, and the tokenizer these tokens; set "
                "model.tokenizer_path to the model's tokenizer"
            )
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(f"{key}: the image processor of {directory} cannot be loaded: {error}") from error
        return cls(int(config["image_token_id"]), "".join(tokens), processor)

    def num_features(self, source: ImageSource, where: str) -> int:
        """Return the number of features of an image, from its size. `where` starts error messages.

        Raises: DataError for an image that cannot be read or resized.
        """
        try:
            patches = self._processor.get_number_of_image_patches(*image_size(source, where))
        except ValueError as error:
            raise DataError(f"{where}: the image processor rejects the image: {error}; remove the row") from None
        return int(patches) // self._processor.merge_size**2

    def process(self, sources: Sequence[ImageSource], token_ids: np.ndarray, where: str) -> PromptImages:
        """Process the images of an expanded prompt.

        Shapes: token_ids int32 [P].
        Raises: DataError for an image that cannot be read, or whose size differs from when the prompt was tokenized.
        """
        images = self._processed(sources, where)
        counts = [self.num_placeholders(image) for image in images]
        starts = image_starts(token_ids, self.image_token, counts)
        if starts is None:
            raise DataError(
                f"{where}: its images have {sum(counts)} features, but the prompt was tokenized for "
                f"{int((token_ids == self.image_token).sum())}; do not change images during a run"
            )
        return PromptImages(images, starts)

    def process_images(self, sources: Sequence[ImageSource], where: str) -> tuple[ProcessedImage, ...]:
        """Decode and process images of tools, in TOOL_FORMATS, wherever their places are. `where` starts error
        messages.

        Raises: DataError for an image that cannot be read or resized.
        """
        return self._processed(sources, where, TOOL_FORMATS)

    def _processed(
        self, sources: Sequence[ImageSource], where: str, formats: tuple[str, ...] | None = None
    ) -> tuple[ProcessedImage, ...]:
        numbered = enumerate(sources, start=1)
        images = [read_image(source, f"{where}: image {number}", formats) for number, source in numbered]
        try:
            features = self._processor.preprocess(images, return_tensors="np")
        except ValueError as error:
            raise DataError(f"{where}: the image processor rejects an image: {error}") from None
        pixels = np.ascontiguousarray(features["pixel_values"], np.float32)
        grids = np.ascontiguousarray(features["image_grid_thw"], np.int32)
        return PromptImages.of(pixels, grids, np.empty(0, np.int32)).images

    def num_placeholders(self, image: ProcessedImage) -> int:
        """Return the number of features, and so of placeholder tokens, of a processed image."""
        return image.num_features(self._processor.merge_size)
