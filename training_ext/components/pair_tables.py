"""Read the cells of a csv as text, and a folder of images, each with its captions in a .txt, as if it were a csv."""

from collections.abc import Callable
from functools import partial
from typing import Any

from training_ext.core.component import Component
from training_ext.core.seam import TRAIN_DATA, VAL_DATA, Seam

DATA = "open_clip_train.data"


class PairTables(Component):
    name = "pair_tables"
    may_be_off = False
    seams = (
        Seam(
            DATA, "pd.read_csv",
            why="a column of digits is read as numbers, without their leading zeros; a folder is no csv",
            contract="CsvDataset reads its cells by pd.read_csv(path, sep=)",
            replacement=lambda original, component: partial(component.read_csv, original),
            used_by=f"{DATA}:CsvDataset.__init__",
            scopes=(TRAIN_DATA, VAL_DATA),
        ),
        Seam(
            DATA, "get_dataset_fn",
            why="a folder of pairs is read as a csv",
            contract="get_data builds each data set by get_dataset_fn(path, type)(args, transform, is_train=, "
            "tokenizer=)",
            replacement=lambda original, component: partial(component.of_folder, original),
            used_by=f"{DATA}:get_data",
            layer=-2,
        ),
    )  # fmt: skip

    def read_csv(self, original: Callable, path: str, **kwargs: Any) -> Any:
        from training_ext.data.tables import read_table

        return read_table(self.args, path, original, **kwargs)

    def of_folder(self, original: Callable, path: str, kind: str) -> Callable:
        from training_ext.data.rows import is_folder

        return original(path, "csv" if is_folder(path, kind) else kind)
