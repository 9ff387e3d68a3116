"""Measures whether a process is at work: CPU seconds and bytes of files that it and its children have used."""

import contextlib
import os
import time

import psutil


def work(process: psutil.Process) -> tuple[float, int]:
    """CPU seconds that a process and its children have used, without the calling thread's, and bytes of files.

    The bytes are those written, and those read from a disk (this function itself reads /proc, which is on none). Bytes
    read from a socket do not count, because a process computes with them or writes them.
    """
    seconds, count, children = 0.0, 0, []
    with contextlib.suppress(psutil.Error):
        children = process.children(recursive=True)
    for each in (process, *children):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            seconds += times.children_user + times.children_system
            own = each.pid == os.getpid()  # the system counts in hundredths of a second, the interpreter in nanoseconds
            seconds += time.process_time() - time.thread_time() if own else times.user + times.system
            if hasattr(each, "io_counters"):  # not on macOS
                done = each.io_counters()
                count += done.read_bytes + done.write_chars
    return seconds, count
