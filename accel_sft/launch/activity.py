"""Measures whether a process is at work: CPU seconds and bytes of files that it and its children have used."""

import contextlib
import os
import time

import psutil


def work(process: psutil.Process) -> tuple[float, int]:
    """Return the CPU seconds that a process and its children used (not the calling thread's), and their bytes of files.

    The bytes are those written, and those read from a disk; reads of /proc, which this function itself makes, do not
    count. Bytes read from a socket need not count, because the process also computes with them or writes them.
    """
    seconds, count = 0.0, 0
    children: list[psutil.Process] = []
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
