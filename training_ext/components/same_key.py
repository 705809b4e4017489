"""Take samples with the same key out of each other's negatives (`--same-key`, `--same-caption`), or pull them together
(`--positives`). The key is a column of the csv, a field of the .json in shards, or the caption."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from open_clip_ext.options import option
from training_ext.core.component import Component
from training_ext.core.rows import has_caption
from training_ext.core.tags import ROW

KEY = "key"  # name of the column


class SameKey(Component):
    name = "same_key"
    topic = "data"
    needs_ext_loss = True
    layer = 1  # of a sample that others leave out nothing is read
    same_key: str | None = option(
        None, "column of the csv, or field of the samples' .json in shards: samples with the same entry are not used "
        "as each other's negatives",
        metavar="NAME",
    )  # fmt: skip
    same_caption: bool = option(False, "samples with the same caption are not used as each other's negatives")
    positives: str | None = option(
        None, "column of the csv, or field of the samples' .json in shards: samples with the same entry are one "
        "another's positives; caption: those with the same caption",
        metavar="NAME",
    )  # fmt: skip
    _of_sample: Any = None  # the function that finds a key in shards
    _of_batch: Any = None

    def wanted(self) -> bool:
        return bool(self.same_key or self.same_caption or self.positives)

    def columns(self) -> Sequence[str]:
        from training_ext.data.sample_keys import key_of_samples

        self._of_sample = key_of_samples(self.args)
        return () if self._of_sample is None else (KEY,)

    def raw_sample(self, sample: dict[str, Any]) -> dict[str, int] | None:
        return {KEY: self._of_sample(sample)} if self._of_sample is not None and has_caption(sample) else {}

    def data_built(self, data: dict[str, Any]) -> None:
        from training_ext.data.sample_keys import find_keys

        if "train" not in data:
            return
        self._of_batch = find_keys(self.args, in_shards=self._of_sample is not None)

    def for_loss(self, tokens: Tensor, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        keys = numbers[KEY] if self._of_batch is None else self._of_batch(tokens, numbers.get(ROW))
        return {"key" if self.positives is None else "positive_key": keys}
