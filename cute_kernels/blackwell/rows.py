"""Rows as cuDNN Frontend's grouped kernels want them: each group padded to 256, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.quantization.groups import pad_groups, padded_offsets, padded_rows, unpad_groups

GROUP_ROWS = 256
"""Every group begins and ends at a multiple of so many rows."""


class PaddedGroups:
    """Where the rows of groups lie once each group is padded.

    offsets: int32 [G+1] with a leading zero, of `rows` rows T without padding.
    padded: M, how many rows a padded buffer has, which the host knows: the most that any split of T rows takes.
    ends: int32 [G], where each padded group ends; the last one at M, so that no row of a buffer is left undefined.
    padded_offsets: int32 [G+1], the same with a leading zero.
    """

    def __init__(self, offsets: Tensor, rows: int) -> None:
        self.offsets, self.rows = offsets, rows
        self.padded = padded_rows(rows, offsets.shape[0] - 1, GROUP_ROWS)
        self.padded_offsets = padded_offsets(offsets, GROUP_ROWS)
        self.padded_offsets[-1:].fill_(self.padded)
        self.ends = self.padded_offsets[1:].clone()  # of its own: kernels want 16-byte aligned addresses
        self._sources = pad_groups(_numbers(rows, offsets), offsets, GROUP_ROWS)[0].squeeze(1)
        self._places = unpad_groups(_numbers(self.padded, offsets), offsets, rows, GROUP_ROWS).squeeze(1)

    def pad(self, t: Tensor) -> Tensor:
        """t [T, ...] as [M, ...], zero where there is no token, whatever t holds past the last one."""
        return _taken(t, self._sources)

    def tokens(self) -> Tensor:
        """FP32 [M]: 1 where there is a token, else 0."""
        return (self._sources > 0).float()

    def unpad(self, t: Tensor) -> Tensor:
        """t [M, ...] as [T, ...], zero past the last token."""
        return _taken(t, self._places)


def _numbers(rows: int, offsets: Tensor) -> Tensor:
    """1, 2, ..., rows as a column; 0 then stands for no row."""
    return torch.arange(1, rows + 1, device=offsets.device).unsqueeze(1)


def _taken(t: Tensor, numbers: Tensor) -> Tensor:
    """Row numbers[i] - 1 of t at i, zero where numbers[i] is 0."""
    if not t.shape[0]:
        return t.new_zeros(numbers.shape[0], *t.shape[1:])
    kept = (numbers > 0).view(-1, *[1] * (t.dim() - 1))
    return torch.where(kept, t[(numbers - 1).clamp_(min=0)], 0)
