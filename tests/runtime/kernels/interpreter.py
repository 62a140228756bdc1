"""What tests say that need Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

# Where whole models and engines are tested: on the GPU itself, if there is one.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Whether kernels are interpreted is settled for a whole process; where there is a GPU, tests/gpu checks them on it.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter; see tests/gpu")
