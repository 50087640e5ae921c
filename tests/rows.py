"""Rows whose blocks lie apart, for the tests of the INT8 and FP8 products."""

import torch
from torch import Tensor

from clef_core.mxfp4 import BLOCK

FEATURES = 8 * BLOCK


def plain_rows(generator: torch.Generator, num_rows: int = 24, features: int = FEATURES) -> Tensor:
    return torch.randn(num_rows, features, generator=generator)


def rows_over(octaves: int, generator: torch.Generator, num_rows: int = 24) -> Tensor:
    """Rows whose blocks lie up to so many octaves apart."""
    x = plain_rows(generator, num_rows)
    down = torch.randint(0, octaves + 1, (num_rows, FEATURES // BLOCK, 1), generator=generator)
    return (x.view(num_rows, -1, BLOCK) * torch.exp2(-down.float())).view(num_rows, -1)
