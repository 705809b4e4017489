"""Generated image-caption data: `Scenes`, the data set of `--dataset-type shapes`."""

import operator
from collections.abc import Callable
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from open_clip_ext.data.scenes import (
    MAX_IMAGE_SIZE,
    MAX_KEY,
    MIN_IMAGE_SIZE,
    Scene,
    check_whole,
    describe_scene,
    shifted_caption,
)


class Scenes(Dataset):
    """A data set of generated scenes: rows `first_row` .. `first_row + num_samples - 1` of `seed`, drawn on access.

    Item i is `(image, caption)`: the RGB image of `image_size` x `image_size` pixels (16 to 512) after `transform`, and
    `tokenizer([caption])[0]`; without these the PIL image and the string. For held-out data, set `first_row` past the
    end of the training data. With `shifted` the scenes are the same, but drawn in the shifted colours and captioned by
    `shifted_caption`.

    Raises:
        ValueError: an argument is out of range (`num_samples` at least 1; `seed` and all rows from 0 to 2**63 - 1).
        IndexError: the index is outside `-num_samples .. num_samples - 1`.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int = 0,
        image_size: int = 64,
        first_row: int = 0,
        transform: Callable[[Image.Image], Any] | None = None,
        tokenizer: Callable[[list[str]], Any] | None = None,
        shifted: bool = False,
    ) -> None:
        self.first_row = check_whole("first_row", first_row, 0, MAX_KEY - 1)
        self.num_samples = check_whole("num_samples", num_samples, 1, MAX_KEY - self.first_row)
        self.seed = check_whole("seed", seed, 0, MAX_KEY)
        self.image_size = check_whole("image_size", image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE)
        self.transform = transform
        self.tokenizer = tokenizer
        self.shifted = shifted

    def __len__(self) -> int:
        return self.num_samples

    def _row(self, i: int) -> int:
        i = operator.index(i)
        if not -self.num_samples <= i < self.num_samples:
            raise IndexError(f"item {i} of {self.num_samples} scenes")
        return self.first_row + i % self.num_samples

    def scene(self, i: int) -> Scene:
        """The description of item i, -num_samples to num_samples - 1; independent of `shifted`.

        Raises:
            IndexError: `i` is out of range.
        """
        return describe_scene(self.seed, self._row(i))

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        scene = self.scene(i)
        image = scene.render(self.image_size, self.shifted)
        caption = shifted_caption(self.seed, self._row(i)) if self.shifted else scene.caption
        if self.transform is not None:
            image = self.transform(image)
        if self.tokenizer is not None:
            caption = self.tokenizer([caption])[0]
        return image, caption
