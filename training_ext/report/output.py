"""The files that a report writes and the table that it prints."""

import json
import os
from typing import Any

import safetensors.torch

from open_clip_ext.files import whole_file
from training_ext.report.figure import draw
from training_ext.report.numbers import QUANTILES, SIDES, Result

REPORT, PICTURE, VALUES = "normalizers.json", "normalizers.png", "normalizers.safetensors"


def write(folder: str, result: Result) -> None:
    """Write the figure, the anchors' values and, last, the JSON file; each is complete or absent."""
    values = {"anchors": result.anchors, "exact": result.exact, **result.estimates}
    with whole_file(os.path.join(folder, PICTURE)) as file:
        draw(file, result.exact, result.estimates, title(result.summary), result.summary.get("gradients"))
    with whole_file(os.path.join(folder, VALUES)) as file:
        file.write(safetensors.torch.save({name: value.contiguous() for name, value in values.items()}))
    with whole_file(os.path.join(folder, REPORT), text=True) as file:
        json.dump(result.summary, file, indent=1, allow_nan=False)
        file.write("\n")


def title(summary: dict[str, Any]) -> str:
    tau = summary["tau"]
    shown = f"tau = {tau:.4g}" if isinstance(tau, float) else "tau = " + ", ".join(
        f"{tau[side]['mean']:.3g} ± {tau[side]['std']:.2g} ({side}s)" for side in SIDES
    )
    epoch = "" if summary["epoch"] is None else f" after epoch {summary['epoch']}"
    rows = summary["rows"] - summary["rows_left_out"]
    return f"Log-normalizers of {summary['loss']}{epoch}: n = {rows:,}, {summary['anchors']:,} anchors a side, {shown}"


def table(result: Result, folder: str) -> str:
    """The table for stdout."""
    summary = result.summary
    lines = [title(summary)]
    if summary["rows_left_out"]:
        lines.append(f"{summary['rows_left_out']} of {summary['rows']} rows left out: {summary['first_problem']}")
    columns = ("mse", "bias", "spread", *(f"{name} %" for name in QUANTILES))
    lines.append(f"{'estimator':16}{'anchors':8}" + "".join(f"{name:>11}" for name in columns))
    for estimator in summary["estimators"]:
        for side in SIDES:
            error = estimator[side]
            numbers = [error[name] for name in ("mse", "bias", "spread")]
            numbers += [(error["quantiles"] or {}).get(str(name)) for name in QUANTILES]
            cells = "".join(f"{number(value):>11}" for value in numbers)
            lines.append(f"{estimator['name'] if side == 'image' else '':16}{side:8}{cells}")
        if missing := estimator["both"]["without_estimate"]:
            lines.append(f"{'':16}{missing} of {2 * summary['anchors']} have no estimate yet and are left out")
    if "rho_of_tau" in summary:
        held = ", ".join(f"{one['tau']:g} with {one['rho']:.2f}" for one in summary["rho_of_tau"])
        lines.append(f"A learned temperature would rest at tau {held} as --rho")
    if "gradients" in summary:
        lines += gradient_table(summary["gradients"])
    lines += [summary["verdict"], os.path.join(folder, REPORT)]
    return "\n".join(lines)


def gradient_table(gradients: dict[str, Any]) -> list[str]:
    """Lines of the gradients' table, with standard errors in brackets."""
    lines = [
        f"Gradients ({gradients['encoder_objective']}) in the embeddings of {gradients['pairs']} pairs, each in "
        f"{gradients['batches']} batches, against the exact ones (standard errors)",
        f"{'estimator':16}{'batch':>6}{'bias':>20}{'noise':>10}{'variance':>20}{'cosine':>20}{'of one batch':>20}",
    ]
    for row in gradients["estimators"]:
        cells = [
            f"{number(row[name])} ({number(row[f'{name}_error'])})"
            for name in ("bias", "variance", "cosine", "batch_cosine")
        ]
        bias, *others = (f"{cell:>20}" for cell in cells)
        noise = number(row["bias_noise"])
        lines.append(f"{row['name']:16}{row['batch_size']:6}{bias}{noise:>10}{''.join(others)}")
    return lines


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
