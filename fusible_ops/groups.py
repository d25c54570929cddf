"""Groups: which rows of a tensor belong together, and where that is from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.facts import WITHOUT_MEMORY


def same_values(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are surely the same numbers: one tensor, or two views of the same memory laid out alike."""
    if a is b:
        return True
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return not isinstance(a, WITHOUT_MEMORY) and a.data_ptr() == b.data_ptr()


def version_of(splits: Tensor | None) -> int:
    """How often they were changed; -1 if that is not counted."""
    if splits is None:
        return 0
    return -1 if splits.is_inference() else splits._version


class Groups(NamedTuple):
    """offsets: int32 [G+1]. splits, version: the split sizes that they were made from, and their version then; None
    where all rows are one group. A version of -1 is of no tensor that is known, or of one that inference mode made, of
    which no changes are counted.
    """

    offsets: Tensor
    splits: Tensor | None = None
    version: int = -1

    @staticmethod
    def of(splits: Tensor | None, rows: int, device: torch.device) -> Groups:
        """The groups of `rows` rows. No host sync."""
        if splits is None:
            whole = torch.full((1,), rows, dtype=torch.int32, device=device)
            return Groups(reference.group_offsets(whole, rows), None, 0)
        return Groups(reference.group_offsets(splits, rows), splits, version_of(splits))

    def are(self, other: Groups | None) -> bool:
        """Whether these are surely the other's groups. Never asks the device."""
        if other is None or self.version < 0 or self.version != other.version:
            return False
        return self.offsets.shape == other.offsets.shape and same_values(self.splits, other.splits)
