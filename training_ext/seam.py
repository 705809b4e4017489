"""One row of the table of seams, see `hooks`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from training_ext.hosts import Host
from training_ext.session import RUN

# Names in braces are those of `hosts.Host`.
MAIN, TRAIN, SHARDS, DATA = "{main}", "{train}", "{shards}", "open_clip_train.data"


@dataclass(frozen=True)
class Seam:
    """One replaced name.

    Args:
        module, path: where it is; a path of several names changes only what this module sees of the last.
        why: what OpenCLIP cannot do without it.
        contract: what is relied on; the thing to check when OpenCLIP changes.
        replacement: from the original and the session to what takes its place.
        scopes: when it is in place: the whole run, or while the train or validation data set is built.
        for_ext_loss: only with a loss of ours; the others also serve OpenCLIP's own losses.
        loop: LEGACY or TASKS of `hosts` where only that loop has the name; None for both.
    """

    module: str
    path: str
    why: str
    contract: str
    replacement: Callable[[Any, Any], Any]
    scopes: tuple[str, ...] = (RUN,)
    for_ext_loss: bool = True
    loop: str | None = None

    def of(self, host: Host) -> "Seam":
        """The row with the host's names."""
        names = asdict(host)
        return replace(self, module=self.module.format(**names), path=self.path.format(**names))
