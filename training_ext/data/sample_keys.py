"""The keys of samples: of the captions' tokens, of a column of a csv, or of a field of the .json in shards."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from open_clip_ext.errors import InputError
from training_ext.data.captions import Pictures
from training_ext.data.keys import has_keys, key_flag, key_name
from training_ext.data.tables import read_table
from training_ext.data.tars import fields_of

_NAMED = 10  # fields in a message
Keys = Callable[[Tensor, Tensor | None], Tensor]
"""Maps tokens (b, L) and rows (b,) of a batch to its keys, (b,) int64."""


def find_keys(args: Namespace, in_shards: bool) -> Keys | None:
    """The function that finds the keys of a batch; None without keys, or if `JsonKey` finds them as shards are read."""
    name = key_name(args)
    if has_keys(args) and name is None:
        return lambda tokens, rows: keys_of_captions(tokens)
    if name is None or in_shards:
        return None
    columns = [name, args.csv_img_key]
    table = read_table(args, args.train_data, sep=args.csv_separator, usecols=columns)
    cells = table[name]
    if getattr(args, "several_captions", None):
        cells = cells[Pictures(table[args.csv_img_key].tolist()).first]
    of_rows = keys_of_cells(cells)
    return lambda tokens, rows: of_rows[rows]


@dataclass(frozen=True)
class JsonKey:
    """The key of a sample: a 64-bit hash of the value of a field in its .json.

    Different values have equal hashes with a probability of 2^-64. An empty value, null or "", equals no other
    sample's: its hash is that of the shard's and the sample's name.
    """

    field: str
    flag: str = "--same-key"

    def __call__(self, sample: dict) -> int:
        """The key, a signed integer, of a sample: a dict of bytes by suffix, with its "__key__" and "__url__".

        Raises:
            InputError: it has no such field; the message names the shard and the sample.
        """
        try:
            fields = fields_of(sample)
        except ValueError as error:
            raise self._error(sample, f"{error}, where the field {self.field!r} is wanted") from None
        if self.field not in fields:
            names = ", ".join(repr(name) for name in list(fields)[:_NAMED]) or "none"
            raise self._error(sample, f"no field {self.field!r} in its .json; its fields are {names}")
        value = fields[self.field]
        if value is None or value == "" or value != value:  # NaN is some writers' missing value
            value = [sample["__url__"], sample["__key__"], "empty"]
        text = json.dumps(value, sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)

    def _error(self, sample: dict, problem: str) -> InputError:
        return InputError(f"sample {sample['__key__']!r} of shard {sample['__url__']!r} has {problem}", self.flag)


def key_of_samples(args: Namespace) -> JsonKey | None:
    """The function that finds the key of a shard's sample as it is read; None if no field has it."""
    name = key_name(args)
    return None if name is None else JsonKey(name, key_flag(args))


def keys_of_cells(cells: pd.Series) -> Tensor:
    """A key for each cell, (n,) int64, equal for equal cells; an empty cell equals no other."""
    codes = torch.from_numpy(pd.factorize(cells)[0].astype("int64"))
    return torch.where(codes >= 0, codes, -1 - torch.arange(len(codes)))


def keys_of_captions(tokens: Tensor) -> Tensor:
    """A hash of each row of tokens (b, L) int64; different rows have equal hashes with a probability of 2^-63."""
    factors = torch.randint(-(2**62), 2**62, (tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    return (tokens * (2 * factors + 1)).sum(dim=1)
