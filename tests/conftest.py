"""What every test shares: one thread per process, so that parallel workers do not fight over cores."""

import torch

torch.set_num_threads(1)
