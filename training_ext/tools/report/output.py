"""What a report writes, and the table that it prints."""

import json
import os
from typing import IO, Any

import safetensors.torch
import torch

from open_clip_ext.files import whole_file
from training_ext.tools.report.numbers import SIDES, Result

REPORT, PICTURE, VALUES = "normalizers.json", "normalizers.png", "normalizers.safetensors"


def write(folder: str, result: Result) -> None:
    """Write the picture, the anchors' values and, last, the JSON file; each is complete or absent."""
    with whole_file(os.path.join(folder, PICTURE)) as file:
        draw(file, result)
    with whole_file(os.path.join(folder, VALUES)) as file:
        file.write(safetensors.torch.save({name: value.contiguous() for name, value in result.values.items()}))
    with whole_file(os.path.join(folder, REPORT), text=True) as file:
        json.dump(result.summary, file, indent=1, allow_nan=False)
        file.write("\n")


def draw(file: IO[bytes], result: Result) -> None:
    """Write a PNG: how many anchors have this true log-normalizer and this estimate, by the first estimator that has
    any."""
    from matplotlib.figure import Figure  # here because it is slow, and a refused run draws nothing

    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    names = [estimator["name"] for estimator in result.summary["estimators"] if estimator["both"]["anchors"]]
    if names:
        estimate = result.values[names[0]]
        has_estimate = ~estimate.isnan()
        true, predicted = result.values["exact"][has_estimate], estimate[has_estimate]
        low, high = (float(f(torch.cat([true, predicted]))) for f in (torch.min, torch.max))
        margin = 0.03 * (high - low) or 0.5
        limits = (low - margin, high + margin)
        *_, histogram = axis.hist2d(
            true.numpy(), predicted.numpy(), bins=80, range=[limits, limits], cmin=1, norm="log", cmap="viridis_r"
        )
        figure.colorbar(histogram, ax=axis, label="anchors", format="{x:,.0f}")
        axis.plot(limits, limits, color="black", linewidth=1, linestyle="--")
        axis.set(xlabel="true log-normalizer", ylabel=f"estimate: {names[0]}", aspect="equal")
        axis.grid(color="#d9d9d9", linewidth=0.6)
        axis.set_axisbelow(True)
    axis.set_title(title(result.summary).replace(": ", ":\n"), fontsize=10)
    figure.savefig(file, dpi=140, format="png")


def title(summary: dict[str, Any]) -> str:
    tau = summary["tau"]
    temperature = f"tau = {tau:.4g}" if isinstance(tau, float) else "tau = " + ", ".join(
        f"{tau[side]['mean']:.3g} ± {tau[side]['std']:.2g} ({side}s)" for side in SIDES
    )
    epoch = "" if summary["epoch"] is None else f" after epoch {summary['epoch']}"
    rows = summary["rows"] - summary["rows_left_out"]
    anchors = f"{summary['anchors']:,} anchors a side"
    return f"Log-normalizers of {summary['loss']}{epoch}: n = {rows:,}, {anchors}, {temperature}"


def table(result: Result, folder: str) -> str:
    """The table for stdout."""
    summary = result.summary
    lines = [title(summary)]
    if summary["rows_left_out"]:
        lines.append(f"{summary['rows_left_out']} of {summary['rows']} rows left out: {summary['first_problem']}")
    columns = ("mse", "bias", "spread")
    lines.append(f"{'estimator':16}{'anchors':8}" + "".join(f"{name:>11}" for name in columns))
    for estimator in summary["estimators"]:
        for side in SIDES:
            values = [estimator[side][name] for name in columns]
            cells = "".join(f"{'-' if value is None else f'{value:.3g}':>11}" for value in values)
            lines.append(f"{estimator['name'] if side == 'image' else '':16}{side:8}{cells}")
        if missing := estimator["both"]["without_estimate"]:
            lines.append(f"{'':16}{missing} of {2 * summary['anchors']} have no estimate yet and are left out")
    if "rho_of_tau" in summary:
        lines += ["", "A learned temperature rests at", f"{'tau':>8}{'with --rho':>14}"]
        lines += [*(f"{one['tau']:8g}{one['rho']:14.2f}" for one in summary["rho_of_tau"]), ""]
    return "\n".join([*lines, summary["verdict"], os.path.join(folder, REPORT)])
