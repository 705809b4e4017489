"""Read the cells of a csv as text, and a folder of images, each with its captions in a .txt, as if it were a csv."""

from dataclasses import replace
from functools import partial

from training_ext.core.component import Component
from training_ext.core.hosts.both import GET_DATASET_FN
from training_ext.core.seam import DATA, TRAIN_DATA, VAL_DATA, Seam
from training_ext.data.rows import is_folder
from training_ext.data.tables import read_table


class PairTables(Component):
    name = "pair_tables"
    may_be_off = False
    seams = (
        Seam(
            DATA, "pd.read_csv",
            why="a column of digits is read as numbers, without their leading zeros; a folder is no csv",
            contract="CsvDataset reads its cells by pd.read_csv(path, sep=)",
            replacement=lambda original, component: partial(read_table, component.args, read=original),
            used_by=f"{DATA}:CsvDataset.__init__",
            scopes=(TRAIN_DATA, VAL_DATA),
        ),
        replace(
            GET_DATASET_FN,
            why="a folder of pairs is read as a csv",
            replacement=lambda original, _: lambda path, kind: original(path, "csv" if is_folder(path, kind) else kind),
            layer=-2,
        ),
    )  # fmt: skip
