"""What is counted: the columns of a row of counts, of a worker or a process, and their names."""

NO_CAPTION, NO_IMAGE, UNREADABLE, SURPLUS = range(4)
"""Why a sample is left out."""
# Over all shards of a worker; distinct samples, used or not; used; lost in bad shards; and of the shards themselves.
PASSES, SEEN, USED, LOST, MISSING, DAMAGED = range(4, 10)
TOTAL = 10
SKIPPED = {
    NO_CAPTION: "without a caption",
    NO_IMAGE: "without an image",
    UNREADABLE: "whose image or caption cannot be read",
    SURPLUS: "with the name of another up to the first dot",
}
BAD_SHARDS = {MISSING: "shard(s) that cannot be opened", DAMAGED: "damaged shard(s)"}
NAMES = {
    USED: "used", NO_CAPTION: "no_caption", NO_IMAGE: "no_image", UNREADABLE: "unreadable", SURPLUS: "surplus",
    LOST: "lost", MISSING: "shards_missing", DAMAGED: "shards_damaged",
}  # fmt: skip


def skipped(counts: list[int]) -> int:
    """Number of samples that are left out."""
    return sum(counts[kind] for kind in SKIPPED)


def with_shards(counts: list[int], bad_shards: dict[int, int]) -> list[int]:
    """The counts with those of the bad shards, of one or all processes."""
    kinds = list(bad_shards.values())
    return [kinds.count(column) if column in BAD_SHARDS else count for column, count in enumerate(counts)]


def describe(counts: list[int]) -> str:
    """What was skipped and why, such as '3 sample(s) without a caption'; '' if nothing was."""
    parts = [f"{counts[kind]} sample(s) {text}" for kind, text in SKIPPED.items() if counts[kind]]
    parts += [f"{counts[kind]} {text}" for kind, text in BAD_SHARDS.items() if counts[kind]]
    if counts[LOST]:
        parts.append(f"{counts[LOST]} sample(s) in them")
    return ", ".join(parts)
