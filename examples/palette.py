"""One colour per method in every figure. Variants of a method share it and differ by their lines."""

from collections import Counter
from collections.abc import Iterable
from itertools import cycle

COLOURS = {
    "clip": "#555555", "siglip": "#000000", "cyclip": "#8c564b", "neuclip": "#d55e00", "queue": "#0072b2",
    "fastclip": "#009e73", "minibatch": "#cc79a7", "batch's own estimates": "#cc79a7", "control": "#cc79a7",
    "amorlip": "#e69f00", "tuneclip": "#56b4e9", "HGCL": "#56b4e9", "GCL": "#7b3294", "sogclr": "#bcbd22",
    "isogclr": "#808000",
}  # fmt: skip
OTHERS = ("#17becf", "#e377c2", "#9467bd", "#a6761d", "#66a61e", "#1f3a93")
LINES = ("-", "--", ":", "-.")


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """matplotlib's colour and line of each name that begins with a method, or has it after a space; others get what
    no method has."""
    others, used, found = cycle(OTHERS), Counter[str](), {}
    for name in names:
        methods = [method for method in COLOURS if name.startswith(method) or f" {method}" in name]
        colour = COLOURS[max(methods, key=len)] if methods else next(others)
        found[name] = {"color": colour, "linestyle": LINES[used[colour] % len(LINES)]}
        used[colour] += 1
    return found
