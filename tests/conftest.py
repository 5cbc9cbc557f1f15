"""One thread per process: the tensors of these tests are small, and threads waiting for each other cost more."""

import torch

torch.set_num_threads(1)
