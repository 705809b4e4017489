"""Settings for a number of pairs: the table of docs/settings.md, for the dry run and the command of make_shards."""

from dataclasses import dataclass
from math import log

FEWEST_STEPS = 10  # per epoch: with fewer, schedules by epochs and restarts each fifth of an epoch are too coarse
UNKNOWN = "no such run is known: a place to begin"


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Args:
        pairs: n of the row.
        batch: least and largest global batch.
        flags: of the loss and the optimizer, with `{rho}` in place of the number.
        rho: None for the loss's own.
        sets_lr_tau: whether `--lr-tau` follows from the number of steps.
        note: what to know before using it.
    """

    pairs: float
    batch: tuple[int, int]
    flags: str
    rho: float | None = None
    sets_lr_tau: bool = False
    note: str = ""

    def largest_batch(self, pairs: int) -> int:
        """That of the row, unless an epoch of so many pairs would have too few steps."""
        return min(self.batch[1], max(2, pairs // FEWEST_STEPS))

    def command(self, pairs: int, steps: int) -> str:
        """The flags for a training on so many pairs, of so many optimizer steps.

        Below the pairs of the first row rho falls with log n, from which it must keep away.
        """
        parts = [self.flags]
        if self.rho is not None:
            parts = [self.flags.format(rho=f"{self.rho * min(1, log(max(3, pairs)) / log(SCRATCH[0].pairs)):.2g}")]
        if self.sets_lr_tau:
            parts.append(f"--lr-tau {recommended_lr_tau(steps)}")
        return " ".join(parts)


SCRATCH = (
    Setting(
        300, (2, 64), "--loss queue --rho {rho} --lr 1e-3 --queue-size 300", 3, sets_lr_tau=True,
        note=f"{UNKNOWN}; fine-tuning is a better one",
    ),
    Setting(10_000, (32, 64), "--loss queue --rho {rho} --lr 1e-3 --lr-tau 1e-3 --queue-size 1024", 5),
    Setting(50_000, (64, 256), "--loss queue --rho {rho} --lr 1e-3", 5.5, sets_lr_tau=True, note=UNKNOWN),
    Setting(100_000, (32, 32), "--loss neuclip --rho {rho} --lr 7e-4 --npn-lr 1", 8),
    Setting(3e6, (1024, 1024), "--loss neuclip --rho {rho} --lr 1e-3 --wd 0.1 --warmup 10000", 6.5),
    Setting(12e6, (2048, 2048), "--loss neuclip --rho {rho} --lr 4e-4 --wd 0.1 --warmup 10000", 8.5),
    Setting(14e6, (4096, 4096), "--loss neuclip --rho {rho} --lr 5e-4 --wd 0.2 --warmup 500", 11),
    Setting(4e8, (5120, 5120), "--loss neuclip --rho {rho} --lr 3.125e-4 --wd 0.2 --warmup 500", 11),
)
PRETRAINED = (
    Setting(300, (16, 32), "--loss tuneclip --lr 1e-4", note=UNKNOWN),
    Setting(10_000, (64, 64), "--loss tuneclip --lr 1e-4", note="for a tiny model; unknown for a large one"),
    Setting(6e6, (2048, 4096), "--loss tuneclip"),
)


def setting_for(pairs: int, pretrained: bool = False) -> Setting:
    """The row whose number of pairs is nearest, by its logarithm."""
    return min(PRETRAINED if pretrained else SCRATCH, key=lambda row: abs(log(row.pairs / max(1, pairs))))


def recommended_lr_tau(steps: int) -> str:
    """`--lr-tau` with which Adam can move log(1 / tau) by 2 in so many steps."""
    return f"{2 / max(1, steps):.1g}"
