"""Copies of a run's folder while its files come and go."""

import logging
import os

import pytest

from training_ext.components.remote_sync import copy


@pytest.fixture
def logs(tmp_path):
    """A folder with a checkpoint, and one that is being written."""
    folder = tmp_path / "logs" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("epoch_0_step_2.pt", "epoch_0_step_4.pt", ".epoch_0_step_6.pt.01234567.partial"):
        (folder / name).write_bytes(b"content")
    return folder.parent


def test_a_file_that_goes_while_it_is_copied_and_half_written_ones(logs, tmp_path, monkeypatch, caplog):
    def attempt(record):
        if "Attempting to sync" in record.getMessage() and "step_2" in record.getMessage():
            (logs / "checkpoints/epoch_0_step_2.pt").unlink()
        return True

    caplog.set_level(logging.INFO)
    with caplog.filtering(attempt):
        assert copy(str(logs), str(tmp_path / "remote"), "fsspec")
    assert not (logs / "checkpoints/epoch_0_step_2.pt").exists()
    copied = {path.name: path.read_bytes() for path in (tmp_path / "remote/checkpoints").iterdir()}
    assert copied == {"epoch_0_step_2.pt": b"content", "epoch_0_step_4.pt": b"content"}


def test_a_file_of_as_many_bytes_as_its_copy(logs, tmp_path, monkeypatch):
    remote, name = tmp_path / "remote", "checkpoints/epoch_0_step_2.pt"
    assert copy(str(logs), str(remote), "fsspec")
    (logs / name).write_bytes(b"CONTENT")
    unchanged = remote / "checkpoints/epoch_0_step_4.pt"
    os.utime(unchanged, (0, 0))
    assert copy(str(logs), str(remote), "fsspec")
    assert (remote / name).read_bytes() == b"CONTENT" and os.stat(unchanged).st_mtime == 0


def test_a_copy_that_fails_is_one_line(logs, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    assert not copy(str(logs), str(tmp_path / "file/remote"), "fsspec")
    assert not copy(str(logs), "unknown://remote", "fsspec")
    assert "--remote-sync: Protocol not known: unknown" in caplog.text and "Traceback" not in caplog.text


def test_s3_leaves_out_half_written_files(logs, tmp_path, monkeypatch):
    aws = tmp_path / "aws"
    aws.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/given\n')
    aws.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert copy(str(logs), "s3://remote", "s3")
    given = (tmp_path / "given").read_text().strip()
    assert given == f"s3 sync {logs} s3://remote --exclude *epoch_latest.pt --exclude *.partial"
