"""The report on a checkpoint's normalizers: `python -m open_clip_ext.normalizers_report`."""

from training_ext.report.command import run

__all__ = ["run"]
