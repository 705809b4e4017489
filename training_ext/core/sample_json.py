"""Read a sample's .json in a shard: its fields, and a key from one of them."""

import hashlib
import json
from typing import Any

from open_clip_ext.errors import InputError
from training_ext.core.tars import one_line
from training_ext.openclip.loading import suffixes_of

_NAMED = 10  # fields in a message


def fields_of(sample: dict) -> dict[str, Any]:
    """The fields of the .json of a sample of bytes by suffix.

    Raises:
        ValueError: there are none; the message says what there is instead.
    """
    if "json" not in sample:
        raise ValueError(f"no .json but {suffixes_of(sample)}")
    try:
        fields = json.loads(sample["json"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a .json that cannot be read: {one_line(error)}") from None
    if not isinstance(fields, dict):
        raise ValueError("a .json that is no object with fields")
    return fields


class JsonKey:
    """The key of a sample: a 64-bit hash of the value of a field in its .json.

    Different values have equal hashes with a probability of 2^-64. An empty value, null or "", equals no other
    sample's: its hash is that of the shard's and the sample's name.

    Args:
        field: name of the field.
    """

    def __init__(self, field: str):
        self.field = field

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

    def _error(self, sample: dict, what: str) -> InputError:
        return InputError(f"sample {sample['__key__']!r} of shard {sample['__url__']!r} has {what}", "--same-key")
