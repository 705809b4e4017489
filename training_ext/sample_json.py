"""What is read of a sample's .json in a shard: its key."""

import hashlib
import json
from typing import Any

from open_clip_ext.errors import InputError
from training_ext.tars import one_line

_NAMED = 10  # fields in a message


class JsonKey:
    """The key of a sample by a field of its .json: a hash of 64 bits of the value, equal where the values are.

    Of two values that differ the hashes are equal with a probability of 2^-64. An empty value, null or "", is like no
    other sample's: its hash is of the shard's and the sample's name.

    Args:
        field: its name.
        flag: that names it, for messages.
    """

    def __init__(self, field: str, flag: str = "--same-key"):
        self.field = field
        self.flag = flag

    def __call__(self, sample: dict) -> int:
        """As a signed number of a sample of bytes by suffix, with its "__key__" and "__url__".

        Raises:
            InputError: it has no such field; the message names the shard and the sample.
        """
        fields = self._fields(sample)
        if self.field not in fields:
            names = ", ".join(repr(name) for name in list(fields)[:_NAMED]) or "none"
            raise self._error(sample, f"no field {self.field!r} in its .json; its fields are {names}")
        value = fields[self.field]
        if value is None or value == "":
            value = [sample["__url__"], sample["__key__"], "empty"]
        text = json.dumps(value, sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)

    def _fields(self, sample: dict) -> dict[str, Any]:
        if "json" not in sample:
            suffixes = ", ".join(f".{name}" for name in sample if not name.startswith("__"))
            raise self._error(sample, f"no .json with the field {self.field!r} but {suffixes}")
        try:
            fields = json.loads(sample["json"])
        except (ValueError, RecursionError) as error:
            raise self._error(sample, f"a .json that cannot be read: {one_line(error)}") from None
        if not isinstance(fields, dict):
            raise self._error(sample, "a .json that is no object with fields")
        return fields

    def _error(self, sample: dict, what: str) -> InputError:
        return InputError(f"{self.flag}: sample {sample['__key__']!r} of shard {sample['__url__']!r} has {what}")
