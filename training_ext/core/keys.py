"""Keys of samples: samples with the same key are not used as each other's negatives.

`--same-key` takes them from a column of a csv or a field of the .json in shards (`sample_json.JsonKey`),
`--same-caption` from the captions. A caption's key is a hash of its tokens, so texts that differ only
beyond the context length have the same key.
"""

from argparse import Namespace
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from open_clip_ext.errors import InputError
from training_ext.core.captions import Pictures
from training_ext.core.sample_json import JsonKey

Keys = Callable[[Tensor, Tensor | None], Tensor]
"""Maps tokens (b, L) and rows (b,) of a batch to its keys, (b,) int64."""


def has_keys(args: Namespace) -> bool:
    return args.same_key is not None or bool(args.same_caption)


def check_keys(args: Namespace, kind: str, takes_keys: bool) -> None:
    """Raise InputError unless the data have the requested keys and the loss can use them.

    Args:
        kind: kind of the train data, as `data.kind_of` gives it.
        takes_keys: as `Loss.takes_keys`.
    """
    if not has_keys(args):
        return
    flag = "--same-caption" if args.same_key is None else "--same-key"
    if args.same_key is not None and args.same_caption:
        raise InputError(f"with --same-key {args.same_key!r}; give one of the two", "--same-caption")
    if not takes_keys:
        raise InputError(
            f"--loss {args.loss} as given cannot leave out single negatives; use one with --normalizer table, "
            "prototypes, queue or batch, and --negatives cross",
            flag,
        )
    if args.same_key is not None and kind not in ("csv", "webdataset"):
        raise InputError(
            f"{args.same_key!r} is a column or a field, and {kind} has none; use --same-caption", "--same-key"
        )


def check_column(args: Namespace, table: pd.DataFrame) -> None:
    """Raise InputError unless the csv has the column of `--same-key`."""
    if args.same_key is not None and args.same_key not in table.columns:
        columns = ", ".join(repr(name) for name in table.columns)
        raise InputError(
            f"{args.train_data!r} has no column {args.same_key!r}; its columns are {columns}", "--same-key"
        )


def columns_of_text(args: Namespace) -> dict[str, type]:
    """pandas' `dtype` for the columns of a csv that are not numbers: as such they lose leading zeros, and with an empty
    cell among them the last digits."""
    return dict.fromkeys(filter(None, (args.csv_img_key, args.csv_caption_key, args.same_key)), str)


def find_keys(args: Namespace, kind: str) -> Keys | None:
    """The function that finds the keys of a batch; None without keys, or if `JsonKey` finds them as shards are read."""
    if args.same_caption:
        return lambda tokens, rows: keys_of_captions(tokens)
    if args.same_key is None or kind == "webdataset":
        return None
    columns = [args.same_key, args.csv_img_key]
    table = pd.read_csv(
        args.train_data, sep=args.csv_separator, usecols=columns, dtype=columns_of_text(args)
    ).reset_index(drop=True)
    cells = table[args.same_key]
    if args.several_captions:
        cells = cells[Pictures(table[args.csv_img_key].tolist()).first]
    of_rows = keys_of_cells(cells)
    return lambda tokens, rows: of_rows[rows]


def key_of_samples(args: Namespace) -> JsonKey | None:
    """The function that finds the key of a shard's sample as it is read; None without --same-key."""
    return None if args.same_key is None else JsonKey(args.same_key)


def keys_of_cells(cells: pd.Series) -> Tensor:
    """A key for each cell, (n,) int64, equal for equal cells; an empty cell equals no other."""
    codes = torch.from_numpy(pd.factorize(cells)[0].astype("int64"))
    return torch.where(codes >= 0, codes, -1 - torch.arange(len(codes)))


def keys_of_captions(tokens: Tensor) -> Tensor:
    """A hash of each row of tokens (b, L) int64; different rows have equal hashes with a probability of 2^-63."""
    factors = torch.randint(-(2**62), 2**62, (tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    return (tokens * (2 * factors + 1)).sum(dim=1)
