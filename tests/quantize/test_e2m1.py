"""The reference quantizer's e2m1 codes are formats.encode's."""

import torch

from fourwave import formats
from fourwave.quantize.reference import encode


def test_codes_of_every_bfloat16_and_around_every_tie():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    edges = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 3e38, 2.0**-149])
    around = torch.cat([edges, *(torch.nextafter(edges, torch.tensor(to)) for to in (9e9, -9e9))])
    values = torch.cat([every, around, -around, torch.tensor([float("inf"), -float("inf"), float("nan")])])
    codes = encode(values, torch.ones(()), formats.E2M1)
    assert torch.equal(codes, formats.encode(values, formats.E2M1))
    assert len(codes.unique()) == 16
