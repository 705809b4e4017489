"""The report on how good a checkpoint's normalizers are: `python -m open_clip_ext.normalizers_report`."""

from training_ext.tools.report.command import run

__all__ = ["run"]
