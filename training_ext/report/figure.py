"""The report's figure: estimated against true log-normalizers, each estimator's errors, and its gradient's bias."""

from typing import IO, TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGE, TEXT, INK, GRID = "#2a6f97", "#d1702b", "#222222", "#d9d9d9"
FEW, MANY = "#a9cfe5", "#08243d"  # of the density; FEW is dark enough to show a single anchor
BINS = 80


def draw(
    file: IO[bytes], exact: Tensor, estimates: dict[str, Tensor], title: str, gradients: dict[str, Any] | None = None
) -> None:
    """Write the figure as PNG.

    Args:
        exact: true log-normalizers, (2, k).
        estimates: by name, (2, k); NaN where there is none. The first is plotted against `exact`.
        title: one line.
        gradients: result of `gradients.compare_gradients`, or None to leave that panel out.
    """
    # Imported here because it is slow, and a refused run draws nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widths = [1, 1.15, 0.8][: 2 if gradients is None else 3]
    figure = Figure(figsize=(12 if gradients is None else 16, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right, *more = figure.subplots(1, len(widths), width_ratios=widths)
    known = {name: value for name, value in estimates.items() if not value.isnan().all()}
    if known:
        name, value = next(iter(known.items()))
        draw_estimate(figure, left, exact, value, name)
    else:
        left.text(0.5, 0.5, "no estimates", ha="center", va="center", transform=left.transAxes)
    draw_errors(right, {name: value - exact for name, value in known.items()})
    if gradients is not None:
        draw_gradients(more[0], gradients)
    figure.suptitle(title, fontsize=11, color=INK)
    figure.savefig(file, dpi=140, format="png")


def draw_estimate(figure: "Figure", axis: "Axes", exact: Tensor, estimate: Tensor, name: str) -> None:
    """Scatter plot of (true, estimate) over the anchors of both directions; a density for more than 2000."""
    from matplotlib.colors import LinearSegmentedColormap

    known = ~estimate.isnan()
    true, given = exact[known], estimate[known]
    low, high = (float(f(torch.cat([true, given]))) for f in (torch.min, torch.max))
    margin = 0.03 * (high - low) or 0.5
    limits = (low - margin, high + margin)
    if len(true) > 2000:
        *_, shown = axis.hist2d(
            true.numpy(), given.numpy(), bins=BINS, range=[limits, limits], cmin=1, norm="log",
            cmap=LinearSegmentedColormap.from_list("anchors", [FEW, IMAGE, MANY]),
        )
        figure.colorbar(shown, ax=axis, label="anchors", pad=0.02)
    else:
        for side, colour, label in ((0, IMAGE, "images"), (1, TEXT, "texts")):
            own = known[side]
            points = (exact[side, own].numpy(), estimate[side, own].numpy())
            axis.scatter(*points, s=12, alpha=0.6, color=colour, label=f"{label} as anchors", linewidths=0)
        axis.legend(frameon=False, loc="upper left")
    axis.plot(limits, limits, color=INK, linewidth=1, linestyle="--")
    axis.set(xlim=limits, ylim=limits, xlabel="true log-normalizer", ylabel=f"estimate: {name}", aspect="equal")
    finish(axis, "both", columns=0)


def draw_errors(axis: "Axes", differences: dict[str, Tensor]) -> None:
    """Histogram of each estimator's errors: images as anchors above its line, texts below.

    Bars span the 5 % to the 95 % quantile; the dot is the mean, that is, the bias. The axis shows 0 and the 0.5 % to
    the 99.5 % quantile of all estimators; values beyond are counted in the outermost bins.
    """
    if not differences:
        return
    both = {name: value[~value.isnan()] for name, value in differences.items()}
    ends = torch.stack([value.quantile(value.new_tensor([0.005, 0.995])) for value in both.values()])
    low, high = ends[:, 0].min().clamp(max=0).item(), ends[:, 1].max().clamp(min=0).item()
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin, high + margin
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    labels = [f"{name}\nmse {value.square().mean():.3g}" for name, value in both.items()]
    axis.set_yticks(range(len(labels))[::-1], labels)
    for level, difference in zip(axis.get_yticks(), differences.values(), strict=True):
        for values, colour, sign in zip(difference, (IMAGE, TEXT), (1, -1), strict=True):
            known = values[~values.isnan()]
            if len(known) == 0:
                continue
            counts = torch.histogram(known.clamp(low, high), edges).hist
            heights = level + sign * 0.42 * counts / counts.max()
            axis.stairs(heights, edges, baseline=level, fill=True, color=colour, alpha=0.45, linewidth=0)
            bar = known.quantile(known.new_tensor([0.05, 0.95])).clamp(low, high)
            axis.plot(bar, [level + sign * 0.06] * 2, color=colour, linewidth=2)
            axis.plot(known.mean().clamp(low, high), level + sign * 0.06, marker="o", markersize=5, color=colour)
    axis.axvline(0, color=INK, linewidth=1, linestyle="--")
    axis.set(xlim=(low, high), ylim=(-0.6, len(labels) - 0.4), xlabel="estimate - true log-normalizer")
    for colour, label in ((IMAGE, "images as anchors (above)"), (TEXT, "texts as anchors (below)")):
        axis.fill_between([], [], color=colour, alpha=0.45, label=label)
    axis.plot([], [], color=INK, linewidth=2, marker="o", markersize=5, label="5 % to 95 %, mean")
    finish(axis, "x", columns=3)


def finish(axis: "Axes", lines: Literal["both", "x"], columns: int) -> None:
    """Draw a grid below the data, and the legend above the panel."""
    axis.grid(axis=lines, color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    if columns:
        axis.legend(frameon=False, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)


def draw_gradients(axis: "Axes", gradients: dict[str, Any]) -> None:
    """Bias by batch size with its standard error, a line per estimator; dashed: what noise alone would show."""
    known = [row for row in gradients["estimators"] if row["bias"] is not None]
    for name in dict.fromkeys(row["name"] for row in known):
        sizes, bias, error, noise = (
            [row[key] for row in known if row["name"] == name]
            for key in ("batch_size", "bias", "bias_error", "bias_noise")
        )
        colour = {"minibatch": TEXT, "exact": INK}.get(name, IMAGE)
        label = f"{name} normalizers" if name == "exact" else name
        axis.errorbar(sizes, bias, error, color=colour, marker="o", markersize=5, linewidth=1.5, label=label)
        axis.plot(sizes, noise, color=colour, linestyle="--", linewidth=1, alpha=0.7)
    axis.plot([], [], color=INK, linestyle="--", linewidth=1, alpha=0.7, label="if it were unbiased")
    axis.set_xscale("log", base=2)
    sizes = sorted({row["batch_size"] for row in known})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set(ylim=(0, None), xlabel="batch size", ylabel="bias of the gradient, of the exact one's norm")
    finish(axis, "both", columns=2)
