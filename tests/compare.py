"""The one tolerance rule, and the one exact comparison.

`assert_as_accurate`: relative error against an FP32 (or FP64) reference may be at most twice the error that plain
PyTorch makes in the same dtype, plus a tiny floor. No test has a tolerance of its own.
"""

from __future__ import annotations

import torch

FACTOR = 2.0


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """||actual - reference||_F / ||reference||_F in FP64; the absolute norm where the reference is zero."""
    a, r = actual.detach().double(), reference.detach().double()
    norm = torch.linalg.vector_norm(r).item()
    error = torch.linalg.vector_norm(a - r).item()
    return error / norm if norm > 0 else error


def floor(dtype: torch.dtype) -> float:
    """Slack, relative to the norm: an eighth of the dtype's rounding step, at least 1e-6 (1e-14 in FP64)."""
    if dtype == torch.float64:
        return 1e-14
    return max(torch.finfo(dtype).eps / 8, 1e-6)


def assert_as_accurate(
    actual: torch.Tensor, same_dtype_pytorch: torch.Tensor, fp32_reference: torch.Tensor, what: str = "result"
) -> None:
    """error(actual) <= 2 * error(same_dtype_pytorch) + floor, both against `fp32_reference`.

    `same_dtype_pytorch` is what plain PyTorch gives in the compute dtype; the floor follows its dtype. Shapes must be
    equal and every value finite.
    """
    assert actual.shape == same_dtype_pytorch.shape == fp32_reference.shape, (
        f"{what}: shapes {tuple(actual.shape)}, {tuple(same_dtype_pytorch.shape)} (same-dtype PyTorch), "
        f"{tuple(fp32_reference.shape)} (FP32 reference) differ"
    )
    if actual.numel() == 0:
        return
    bad = int((~torch.isfinite(actual)).sum())
    assert bad == 0, (
        f"{what}: {bad} of {actual.numel()} values are not finite; the first is at {_first(~actual.isfinite())}"
    )
    mine = relative_error(actual, fp32_reference)
    theirs = relative_error(same_dtype_pytorch, fp32_reference)
    bound = FACTOR * theirs + floor(same_dtype_pytorch.dtype)
    assert mine <= bound, (
        f"{what}: relative error against FP32 is {mine:.3e}, but same-dtype PyTorch has {theirs:.3e}, "
        f"so at most {bound:.3e} is allowed; {_largest_difference(actual, fp32_reference)}"
    )


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Same shape, dtype and bits (-0.0 differs from 0.0; equal NaN bits are equal). Names the first difference."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if actual.numel() == 0:
        return
    a, e = _bytes(actual), _bytes(expected)
    differs = (a != e).any(dim=-1)
    count = int(differs.sum())
    if count:
        at = _first(differs.reshape(actual.shape))
        raise AssertionError(
            f"{what}: {count} of {actual.numel()} elements differ; the first is at {at}: "
            f"{actual[at].item()!r} (bytes {a[differs][0].tolist()}), "
            f"expected {expected[at].item()!r} (bytes {e[differs][0].tolist()})"
        )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The elements of x in row order, as uint8 [numel, itemsize], on the CPU."""
    flat = x.detach().cpu().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _largest_difference(actual: torch.Tensor, reference: torch.Tensor) -> str:
    difference = (actual.detach().double() - reference.detach().double()).abs()
    flat = int(difference.reshape(-1).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
    return f"the largest difference is at {at}: {actual[at].item():.6g}, reference {reference[at].item():.6g}"
