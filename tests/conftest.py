"""One thread per process: the tensors of these tests are small, and threads waiting for each other cost more."""

import os
import signal
import sys

import torch
from real_libraries import LIBRARIES

torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would the runs that tests start
sys.path.append(str(LIBRARIES))  # last: what the environment has comes first


def pytest_xdist_auto_num_workers() -> int:
    """Return the processes of `-n auto`: one more than there are cores, since tests of runs wait for each other."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1
