"""The comparison rules themselves: what they let pass, what they refuse, and what they say."""

from __future__ import annotations

import pytest
import torch

from tests.cases import SPLITS, TAIL
from tests.compare import assert_as_accurate, assert_bitwise_equal, relative_error

REFERENCE = torch.linspace(-3, 3, 1000).reshape(10, 100)
ROUNDED = REFERENCE.bfloat16()


def test_twice_the_error_of_pytorch_passes_and_three_times_does_not() -> None:
    error = ROUNDED.float() - REFERENCE
    assert_as_accurate(ROUNDED, ROUNDED, REFERENCE)
    assert_as_accurate(REFERENCE + 2 * error, ROUNDED, REFERENCE)
    with pytest.raises(AssertionError, match=r"y: relative error .* but same-dtype PyTorch has .* at most .* at \("):
        assert_as_accurate(REFERENCE + 3 * error, ROUNDED, REFERENCE, "y")


def test_an_exact_pytorch_result_leaves_only_the_floor() -> None:
    assert_as_accurate(REFERENCE * (1 + 5e-7), REFERENCE, REFERENCE)
    with pytest.raises(AssertionError, match="relative error"):
        assert_as_accurate(REFERENCE * (1 + 5e-6), REFERENCE, REFERENCE)


def test_values_that_are_not_finite_fail_even_where_pytorch_has_them() -> None:
    broken = REFERENCE.clone()
    broken[4, 7] = torch.nan
    with pytest.raises(AssertionError, match=r"1 of 1000 values are not finite; the first is at \(4, 7\)"):
        assert_as_accurate(broken, broken, REFERENCE)


def test_a_zero_reference_wants_zero() -> None:
    zero = torch.zeros(3)
    assert_as_accurate(zero, zero, zero)
    with pytest.raises(AssertionError):
        assert_as_accurate(torch.full((3,), 1e-3), zero, zero)
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0


def test_shapes_must_be_equal() -> None:
    with pytest.raises(AssertionError, match="shapes"):
        assert_as_accurate(REFERENCE[:1], REFERENCE, REFERENCE)
    assert_as_accurate(REFERENCE[:0], ROUNDED[:0], REFERENCE[:0])


def test_bitwise_names_the_first_element_that_differs() -> None:
    other = ROUNDED.clone()
    other[2, 50:53] = 9.0
    assert_bitwise_equal(ROUNDED, ROUNDED.clone())
    with pytest.raises(AssertionError, match=r"z: 3 of 1000 elements differ; the first is at \(2, 50\): 9\.0"):
        assert_bitwise_equal(other, ROUNDED, "z")
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(ROUNDED, REFERENCE)


def test_bitwise_tells_negative_zero_from_zero_and_takes_nan_as_itself() -> None:
    assert_bitwise_equal(torch.tensor(torch.nan), torch.tensor(torch.nan))
    with pytest.raises(AssertionError):
        assert_bitwise_equal(torch.tensor(-0.0), torch.tensor(0.0))


def test_cases_are_what_their_names_say() -> None:
    assert len({case.name for case in SPLITS}) == len(SPLITS)
    assert all(case.used <= case.rows for case in SPLITS)
    assert TAIL.used < TAIL.rows and TAIL.slices()[-1].stop == TAIL.used
