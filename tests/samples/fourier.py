"""Samples for the rules of shardwise/rules/linalg.py: Fourier transforms."""

from __future__ import annotations

import torch

from tests.helpers.one_device import Sample, sample

aten = torch.ops.aten
WAVE = torch.complex(torch.arange(30.0).view(5, 3, 2).sin(), torch.arange(30.0).view(5, 3, 2).cos())

SAMPLES: dict[str, list[Sample]] = {
    "aten._fft_c2c": [
        sample(lambda x: torch.fft.fft(x, dim=0), WAVE),
        sample(lambda x: torch.fft.ifft2(x, norm="ortho"), WAVE),
        sample(lambda x: torch.fft.fftn(x), WAVE),
    ],
    "aten._fft_r2c": [sample(lambda x: torch.fft.rfft(x, dim=0), (5, 3)), sample(torch.fft.rfft2, (2, 5, 4))],
    "aten._fft_c2r": [
        sample(lambda x: torch.fft.irfft(x, 7, 0), WAVE),
        sample(lambda x: torch.fft.irfftn(x, (5, 4), (0, 1)), WAVE),
    ],
    "aten._conj_physical": [sample(aten._conj_physical, WAVE)],
}
