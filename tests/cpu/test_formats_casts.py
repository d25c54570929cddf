"""Conversions of single values: E4M3, E5M2, E2M1, E8M0, and the random bits of stochastic rounding."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.quantization.casts import (
    cast_e2m1,
    cast_e8m0,
    cast_fp8,
    decode_e2m1,
    e8m0_reciprocal,
    pack_e2m1,
    unpack_e2m1,
)
from cute_kernels.quantization.formats import E4M3, E5M2, Element
from cute_kernels.quantization.random_bits import philox, random_bytes, random_state
from tests.compare import assert_bitwise_equal
from tests.oracle_values import CASTS

NAN, INF = float("nan"), float("inf")
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def u8(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def all_kinds_of_values() -> torch.Tensor:
    """Every BF16 and every FP16 value, and random FP32 bits: FP32 [231072], with NaNs and infinities of both signs."""
    bits = torch.arange(65536, dtype=torch.int32)
    random = torch.randint(-(2**31), 2**31 - 1, (100_000,)).to(torch.int32)
    halves = bits.to(torch.int16).view(torch.float16).float()
    return torch.cat([(bits << 16).view(torch.float32), halves, random.view(torch.float32)])


@pytest.mark.parametrize(("element", "column"), [(E4M3, 1), (E5M2, 2)], ids=["E4M3", "E5M2"])
def test_fp8_of_chosen_values(element: Element, column: int) -> None:
    x = torch.tensor([row[0] for row in CASTS])
    want = torch.tensor([row[column] for row in CASTS], dtype=torch.uint8)
    assert_bitwise_equal(u8(cast_fp8(x, element)), want, element.name)
    assert_bitwise_equal(u8(cast_fp8(-x, element)), want ^ 0x80, f"-{element.name}")


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_fp8_nan_of_either_sign_is_one_byte(element: Element) -> None:
    assert u8(cast_fp8(torch.tensor([NAN, -NAN]), element)).tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_fp8_equals_ml_dtypes(element: Element) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    kind = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}[element.name]
    x = all_kinds_of_values()
    x = x[~x.isnan()]
    clamped = x.clamp(-element.max, element.max).numpy()
    assert_bitwise_equal(u8(cast_fp8(x, element)), torch.from_numpy(clamped.astype(kind).view("uint8")), element.name)


def test_e2m1_equals_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = all_kinds_of_values()
    x = x[~x.isnan()]
    want = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8")
    assert_bitwise_equal(cast_e2m1(x), torch.from_numpy(want), "E2M1")


def test_e2m1_thresholds_and_ties_to_even() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor(ties)
    assert cast_e2m1(x).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert cast_e2m1(x.nextafter(torch.tensor(INF))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert cast_e2m1(x.nextafter(torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert cast_e2m1(-x).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert cast_e2m1(torch.tensor([0.0, -0.0, -1e-30, 1e30, INF, -INF, NAN, -NAN])).tolist() == [
        0,
        8,
        8,
        7,
        7,
        15,
        7,
        7,
    ]


def test_e2m1_decodes_and_packs() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    want = torch.tensor(E2M1_VALUES + [-v for v in E2M1_VALUES])
    assert_bitwise_equal(decode_e2m1(codes), want, "values")
    assert_bitwise_equal(cast_e2m1(want), codes, "codes")
    assert pack_e2m1(codes).tolist()[:2] == [0x10, 0x32]
    assert_bitwise_equal(unpack_e2m1(pack_e2m1(codes)), codes, "round trip")


def test_e2m1_stochastic_is_up_for_the_right_share_of_bytes() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    # distance from the lower neighbour in 1/256 of the step: that many of the 256 bytes round up
    for x, low, ups in [
        (0.3, 0.0, 153),
        (0.5, 0.5, 0),
        (1.25, 1.0, 128),
        (2.25, 2.0, 64),
        (5.5, 4.0, 192),
        (6.0, 6.0, 0),
    ]:
        drawn = decode_e2m1(cast_e2m1(torch.full((256,), x), byte))
        assert int((drawn > low).sum()) == ups, x
        assert len(drawn.unique()) <= 2
        assert_bitwise_equal(decode_e2m1(cast_e2m1(torch.full((256,), -x), byte)), -drawn, "negative")
    assert cast_e2m1(torch.tensor([1e9, -INF, NAN]), byte[-3:]).tolist() == [7, 15, 7]


def test_e8m0_is_the_next_power_of_two() -> None:
    chosen = {
        0.0: 0,
        2.0**-149: 0,
        2.0**-127: 0,
        2.0**-127 + 2.0**-149: 1,
        2.0**-126: 1,
        2.0**-126 + 2.0**-149: 2,
        1.0: 127,
        1.0 + 2.0**-23: 128,
        2.0: 128,
        2.0**127: 254,
        1.5 * 2.0**127: 254,
        INF: 254,
        NAN: 255,
    }
    x = torch.tensor(list(chosen))
    assert u8(cast_e8m0(x)).tolist() == list(chosen.values())
    x = all_kinds_of_values().abs()
    x = x[x.isfinite() & (x > 0)]
    mantissa, exponent = torch.frexp(x.double())
    want = (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254).to(torch.uint8)
    assert_bitwise_equal(u8(cast_e8m0(x)), want, "E8M0")


def test_e8m0_decodes_and_inverts() -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    exponents = torch.arange(255).double() - 127
    assert_bitwise_equal(scale.float()[:255], torch.exp2(exponents).float(), "scales")
    assert_bitwise_equal(e8m0_reciprocal(scale)[:255], torch.exp2(-exponents).float(), "reciprocals")
    assert scale.float()[255].isnan() and e8m0_reciprocal(scale)[255].isnan()


def test_philox_gives_the_known_answers() -> None:
    """Those of Random123 (kat_vectors, philox4x32 7)."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    known = [
        ((0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 6, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (pi, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ]
    for words, want in known:
        c0, c1, c2, c3, k0, k1 = (torch.tensor(word) for word in words)
        assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == want


def test_random_bytes_follow_the_state() -> None:
    state = torch.tensor([0x0123456789ABCDEF, 7 << 32 | 5])
    drawn = random_bytes(1000, state)
    c0, c1, c2, c3, k0, k1 = (torch.tensor(w) for w in (3, 0, 5, 7, 0x89ABCDEF, 0x01234567))
    words = torch.stack(philox((c0, c1, c2, c3), (k0, k1)))
    assert_bitwise_equal(drawn[3], words.to(torch.int64).view(torch.uint8).reshape(4, 8)[:, :4].flatten(), "block 3")
    assert_bitwise_equal(random_bytes(1000, state.clone()), drawn, "repeated")
    for other in (random_bytes(1000, state, 1), random_bytes(1000, state + 1), random_bytes(1000, random_state())):
        assert 0.98 < (other != drawn).float().mean().item() < 1.0
    counts = drawn.flatten().bincount(minlength=256).double()
    assert ((counts - 62.5) ** 2 / 62.5).sum().item() < 350  # chi-square, 255 degrees of freedom: p < 1e-4
    with pytest.raises(ValueError, match="needs 0 or 1"):
        random_bytes(1, state, 2)


def test_random_state_is_fresh_and_follows_a_generator() -> None:
    assert not torch.equal(random_state(), random_state())
    first = random_state(generator=torch.Generator().manual_seed(3))
    assert_bitwise_equal(random_state(generator=torch.Generator().manual_seed(3)), first, "state")
