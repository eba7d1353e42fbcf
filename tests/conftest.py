import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Reference tensors; GOLDEN_DIR points at other files of the same kind."""
    return Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent / "golden"))
