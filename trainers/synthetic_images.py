"""Images generated from their index: any rank creates any image in O(1), and nothing is stored."""

import hashlib
import math

import torch
from torch import Tensor

from trainers.data import Batch, permute
from trainers.image_config import ImagesConfig

# Wavelengths in pixels of the finest and the coarsest grating.
WAVE_LEAST, WAVE_MOST = 3.0, 8.0


class SyntheticImages:
    """Coloured gratings with noise: direction and wavelength define the class; phase, colour and noise are random."""

    def __init__(self, config: ImagesConfig, part: str) -> None:
        """Generate the images of `part`. Different parts have no images in common."""
        self._config = config
        self._key = f"{config.seed}/{part}"
        self.class_count = config.directions * config.finenesses
        shape = f"{config.size}/{config.directions}/{config.finenesses}/{config.noise}/{config.count}"
        self.fingerprint = hashlib.sha256(f"pictures 1/{shape}/{self._key}".encode()).hexdigest()
        rows, columns = torch.meshgrid(*(2 * [torch.arange(config.size, dtype=torch.float32)]), indexing="ij")
        self._rows, self._columns = rows, columns

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return images `[count, 3, size, size]` and their classes `[count]`."""
        drawn = [self._draw(sample_first + offset) for offset in range(sample_count)]
        return torch.stack([image for image, _ in drawn]), torch.tensor([number for _, number in drawn])

    def _draw(self, sample: int) -> tuple[Tensor, int]:
        epoch, place = divmod(sample, self._config.count)
        picture = permute(place, self._config.count, f"{self._key}/{epoch}")
        # By a hash instead of `seed + index`, so that adjacent seeds do not generate related images.
        digest = hashlib.blake2b(f"{self._key}/{picture}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        number = picture % self.class_count
        phase, *colour = torch.rand(4, generator=generator).tolist()
        angle = math.pi * (number % self._config.directions) / self._config.directions
        along = self._columns * math.cos(angle) + self._rows * math.sin(angle)
        grating = torch.sin(2 * math.pi * (along / self._find_wave(number) + phase))
        image = grating * torch.tensor(colour).add(0.5).view(3, 1, 1)
        return image + self._config.noise * torch.randn(image.shape, generator=generator), number

    def _find_wave(self, number: int) -> float:
        """Return the wavelength of a fineness, in pixels; they are evenly spaced by ratio."""
        share = (number // self._config.directions) / max(1, self._config.finenesses - 1)
        return float(WAVE_LEAST * (WAVE_MOST / WAVE_LEAST) ** share)
