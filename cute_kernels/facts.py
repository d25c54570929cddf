"""What the host reads of a tensor without asking the device, and what callers may keep of it from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

VECTOR_BYTES = 16
WITHOUT_MEMORY = (FakeTensor, FunctionalTensor)
"""Classes of tensors that have no address: a compiler's, and those of FakeTensorMode."""

T = TypeVar("T")


class TensorFacts(NamedTuple):
    """What checks read of a tensor. kind: its class. aligned: it starts at a multiple of 16 bytes."""

    kind: type
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    device: torch.device
    aligned: bool

    def is_contiguous(self) -> bool:
        """As `Tensor.is_contiguous`."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True

    def is_transposed(self) -> bool:
        """Whether its last two dimensions, exchanged, would make it contiguous, which it is not."""
        swapped = (*range(len(self.shape) - 2), -1, -2)
        shape, strides = (tuple(x[i] for i in swapped) for x in (self.shape, self.strides))
        return not self.is_contiguous() and self._replace(shape=torch.Size(shape), strides=strides).is_contiguous()


class ListFacts(NamedTuple):
    """What checks read of a list of tensors. kinds: their facts, those that differ; length: how many tensors."""

    kinds: tuple[TensorFacts, ...]
    length: int

    @property
    def separate(self) -> bool:
        """Whether it is G tensors, not one stacked [G, N, K]."""
        return self.length != 1 or len(self.kinds[0].shape) != 3


_new = tuple.__new__  # half the time of TensorFacts(...), and a launch makes four


def facts(t: Tensor) -> TensorFacts:
    return _new(TensorFacts, (type(t), t.dtype, t.shape, t.stride(), t.device, t.data_ptr() % VECTOR_BYTES == 0))


def likeness(*tensors: Tensor) -> Callable[..., bool] | None:
    """A function of as many tensors: whether they have the same facts as these (but for alignment) and require
    gradients alike. It keeps none of them.

    One call takes about a microsecond and 0.1 for each tensor, a tenth of what `facts` take: it is the C++ function
    behind the guards of torch.compile. None where that cannot be had. False if one tensor is given twice.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None


def facts_or_none(t: Tensor | None) -> TensorFacts | None:
    return None if t is None else facts(t)


def list_facts(tensors: Sequence[Tensor]) -> ListFacts:
    kinds = (facts(tensors[0]),) if len(tensors) == 1 else tuple(dict.fromkeys(map(facts, tensors)))
    return _new(ListFacts, (kinds, len(tensors)))


class Plans(dict[Callable[..., Any], Any]):
    """Plans of host functions, kept by a caller whose calls are alike: the same facts of all operands, the same of
    everything else. A host function that is given them looks at its operands at the first call only.

    The keys are the functions that make the plans.
    """

    # Dataclasses refuse a default without a hash, and theirs is `NO_PLANS`.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def keep(self, planner: Callable[..., T], plan: T) -> T:
        self[planner] = plan
        return plan


class _Forgetful(Plans):
    """Keeps nothing."""

    def keep(self, planner: Callable[..., T], plan: T) -> T:
        return plan


NO_PLANS = _Forgetful()
"""For calls that need not be alike."""
