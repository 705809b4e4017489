"""Worker processes: how many fit this machine, and their end with the process that started them."""

import multiprocessing
import os
import threading


def usable_cores() -> int:
    """Number of CPU cores that this process may use, which in a container may be fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def end_with_parent() -> None:
    """Let this worker end when its parent does: a parent that is killed cannot shut down its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
