"""One thread per process: the tensors of these tests are small, and threads waiting for each other cost more."""

import signal
import sys

import torch
from real_libraries import LIBRARIES

torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would the runs that tests start
sys.path.append(str(LIBRARIES))  # last: what the environment has comes first
