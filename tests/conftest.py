"""One thread per process: the tensors of these tests are small, and threads waiting for each other cost more."""

import sys

import torch
from real_libraries import LIBRARIES

torch.set_num_threads(1)
sys.path.append(str(LIBRARIES))  # last: what the environment has comes first
