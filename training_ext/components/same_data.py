"""Refuse to resume with other train data, if the loss has rows, or another reference model than the checkpoint's.

The loss's state per sample belongs to the rows of these data.
"""

from argparse import Namespace
from functools import cached_property
from typing import Any

from open_clip_ext.errors import InputError
from open_clip_ext.recovery import digest_of
from training_ext.core.component import Component
from training_ext.core.plan import world_info
from training_ext.core.state import INSTEAD
from training_ext.data.rows import DataRows, needs_index
from training_ext.openclip.loading import warn_once


class SameData(Component):
    name = "same_data"
    may_be_off = False
    state_is_needed: bool = False

    def wanted(self) -> bool:
        return self.args.uses_ext_loss

    @cached_property
    def _reference(self) -> str | None:
        """The digest of the model of --distill-model, once it is built."""
        model = self.training.reference
        return None if model is None else digest_of(model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        rows: DataRows | None = self.training.data.rows
        if rows is None:
            return {}
        keys = {} if rows.shards is None else rows.shards.counted
        state = {"digest": rows.digest, "listing": rows.listing, "num_rows": rows.num_rows, "shard_keys": keys}
        return {**state, "reference": self._reference}

    def older_state(self, entry: dict[str, Any]) -> dict[str, Any]:
        state = {"digest": entry["data_digest"], "listing": entry.get("data_listing", entry["data_digest"])}
        state |= {"shard_keys": entry.get("shard_keys", {}), "num_rows": entry["num_rows"]}
        return state | ({"reference": entry["reference"]} if "reference" in entry else {})

    def check_state(self, state: dict[str, Any], path: str) -> None:
        """The same, as far as data and reference model are known: before the start, and when the file is loaded."""
        if not state:
            return
        rows = self.training.data.rows
        if rows is not None:
            check_rows(state, rows, path, self.args)
            if self.plan.is_first and state["digest"] == rows.captions:
                warn_once(f"{path!r} does not say which images its captions had; check that they are the same")
        if self.training.model is not None and state.get("reference", self._reference) != self._reference:
            raise InputError(
                f"{self.args.distill_pretrained!r} has other weights than the reference model with which "
                f"{path!r} was trained; give those",
                "--distill-pretrained",
            )


def check_rows(state: dict[str, Any], rows: DataRows, path: str, args: Namespace) -> None:
    """Raise InputError if the train data are not those of the state in the checkpoint `path`; only warn where a run
    of a loss without rows resumes."""
    num_rows = state["num_rows"]
    if not is_same(state, rows):
        if rows.kind in ("synthetic", "shapes") and num_rows != rows.num_rows:
            raise InputError(f"{rows.num_rows}, but {path!r} has {num_rows}; give {num_rows}", "--train-num-samples")
        others = "samples" if rows.captions is None else "captions, or images below the folder of all"
        difference = f"{num_rows} rows; --train-data has {rows.num_rows}"
        if num_rows == rows.num_rows:
            difference = f"as many rows, {num_rows}, with other {others}"
        elif rows.shards is not None and num_rows > rows.num_rows:
            difference += "; if shards are missing or damaged, give their sizes by --shard-sizes"
        wrong = f"{path!r} was trained on other data ({difference})"
        if needs_index(args) or args.resume is None:  # the report's checkpoint
            raise InputError(f"{wrong}; {INSTEAD}", "--resume")
        if world_info()[1] == 0:
            warn_once(f"--resume: {wrong}; the order of the data changes")
        return
    if rows.shards is not None and needs_index(args):
        for name, digest in rows.shards.counted.items():
            if state["shard_keys"].get(name, digest) != digest:
                raise InputError(
                    f"{path!r} was trained on other samples: those in shard {name!r} have other keys now; {INSTEAD}",
                    "--resume",
                )


def is_same(state: dict[str, Any], rows: DataRows) -> bool:
    """Whether the state's training had these rows. If one of the two has not counted its shards, by their names alone,
    since then `num_rows` is the length of an epoch."""
    if state["digest"] in (rows.digest, rows.captions):
        return not rows.counted or rows.num_rows == state["num_rows"]
    both_counted = rows.counted and state["digest"] != state["listing"]
    return not both_counted and rows.listing == state["listing"]
