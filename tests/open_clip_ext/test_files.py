"""One process at a time uses a folder, and several may write one file."""

import io
import multiprocessing
import os
import re
import signal
import socket
import time

import pytest
import torch

from open_clip_ext import files
from open_clip_ext.files import LOCK, InUseError, only_user, whole_file

CONTEXT = multiprocessing.get_context("fork")  # does not import torch again


def hold(folder, forks, told):
    with only_user(folder):
        if not forks:
            told.send(None)
        elif os.fork() == 0:
            told.send(os.getpid())  # the child itself, once it is without its parent's lock
        time.sleep(600)


def no_locks(file, operation):
    raise OSError(95, "Operation not supported")


@pytest.fixture
def start():
    """start(folder, forks) -> a process that uses a folder, and the number of its child; killed at the end."""
    started = []

    def start(folder, forks=False):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=hold, args=(folder, forks, theirs))
        process.start()
        started.append(process)
        return process, ours.recv()

    yield start
    for process in started:
        process.kill()
        process.join()


def test_another_process_is_named_and_a_killed_one_leaves_no_lock(start, tmp_path):
    folder = tmp_path / "logs" / "run"
    other, _ = start(folder)
    named = f"process {other.pid} on {re.escape(socket.gethostname())}"
    with pytest.raises(InUseError, match=named), only_user(folder):
        pass
    other.kill()
    other.join()
    with only_user(folder):
        assert (folder / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(InUseError, match=f"process {os.getpid()} "), only_user(folder):
            pass
    assert not list(folder.iterdir())


def test_a_child_that_outlives_a_killed_process_does_not_keep_its_lock(start, tmp_path):
    other, child = start(tmp_path, forks=True)
    other.kill()
    other.join()
    try:
        with only_user(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_folders_that_were_made_and_are_empty_are_removed(tmp_path):
    with only_user(tmp_path / "logs" / "a"):
        pass
    assert not list(tmp_path.iterdir())
    with only_user(tmp_path / "logs" / "a"):
        (tmp_path / "logs" / "log").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["logs", "log"]


def test_a_link_at_the_locks_place_is_not_followed(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"), only_user(tmp_path):
        pass
    (tmp_path / "victim").write_text("as it was")
    with pytest.raises(OSError, match="symbolic link"), only_user(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "as it was"


def test_without_locks_all_are_let_in(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with only_user(tmp_path), only_user(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_each_of_two_writers_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "a.json"
    with whole_file(path, text=True) as first:
        first.write("first")
        with whole_file(path, text=True) as second:
            second.write("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and [*tmp_path.iterdir()] == [path]


def test_ctrl_c_while_torch_writes(tmp_path):
    """Its writer raises a RuntimeError in place of the KeyboardInterrupt."""

    class Interrupted(io.BytesIO):
        def write(self, data):
            if self.tell():
                raise KeyboardInterrupt
            return super().write(data)

    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "x.pt"):
        torch.save({"weights": torch.zeros(10)}, Interrupted())
    assert not list(tmp_path.iterdir())
