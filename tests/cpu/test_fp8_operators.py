"""The FP8 operators: schemas, shape functions, and that CPU tensors get the reference."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import fp8_reference, ops, registry
from cute_kernels.activation import Activation
from cute_kernels.blackwell import mxfp8_reference, nvfp4_reference
from cute_kernels.blackwell.operands import operand
from cute_kernels.quantization.formats import mxfp8, nvfp4
from cute_kernels.quantization.quantize import quantize
from fusible_ops.sharing import BOUNDED, SUMMED
from tests.compare import assert_bitwise_equal

T, K, N, WIDTH = 24, 160, 192, 96
SIZES = torch.tensor([9, 0, 11])
OFFSETS, PADDED = fp8_reference.padded_group_offsets(SIZES, T)
SWIGLU, SRELU = Activation("swiglu"), Activation("srelu")
X, DY = torch.randn(T, K).bfloat16(), torch.randn(T, K).bfloat16()
W1, W2 = torch.randn(3, N, K).bfloat16(), torch.randn(3, K, WIDTH).bfloat16()
PREACT = torch.randn(T, N).bfloat16()

x, dy = (fp8_reference.fp8_quantize(t, OFFSETS, PADDED) for t in (X, DY))
w1, w2 = (fp8_reference.fp8_quantize_weight([w]) for w in (W1, W2))
PROBS = torch.rand(T)

CALLS = {
    "padded_group_offsets": (SIZES, T),
    "fp8_quantize": (X, OFFSETS, PADDED, True, True, True, True),
    "fp8_quantize_weight": ([*W1.unbind(0)], True, False),
    "fp8_grouped_gemm": (x.data, x.scale, w1.data, w1.scale, OFFSETS, torch.randn(3, N).bfloat16(), PROBS, 1),
    "fp8_grouped_gemm_act": (
        *(x.data, x.scale, w1.data, w1.scale, OFFSETS, PADDED, SWIGLU.encode(), None, PROBS),
        *(True, True, True, True, False),
    ),
    "fp8_grouped_gemm_dact": (
        *(dy.data, dy.scale, w2.data_t, w2.scale_t, OFFSETS, PADDED, PREACT, None, SWIGLU.encode(), PROBS),
        *(True, True, True, True, True),
    ),
    "fp8_grouped_wgrad": (dy.data_t, dy.scale_t, x.data_t, x.scale_t, PADDED, 0),
    "fp8_grouped_wgrad_": ([torch.zeros(3, K, K)], dy.data_t, dy.scale_t, x.data_t, x.scale_t, PADDED, 0, True),
}

ENDS = torch.tensor([256, 256, 512], dtype=torch.int32)
ROWS, COLUMNS = (mxfp8_reference.quantize_rows(torch.randn(512, K), ENDS, columnwise) for columnwise in (False, True))
MX_W = [operand(quantize(w, mxfp8(), columnwise), mxfp8(), columnwise) for w, columnwise in ((W1, False), (W2, True))]
MX_BACK, MX_ACT, MX_PROBS = (MX_W[1].data.mT, MX_W[1].scale), SWIGLU.encode(), torch.rand(512)

CALLS |= {
    "padded_mxfp8_gemm": (*ROWS, *MX_W[0], ENDS, torch.randn(3, N).bfloat16(), MX_PROBS),
    "padded_mxfp8_gemm_act": (*ROWS, *MX_W[0], ENDS, MX_ACT, torch.randn(3, N).bfloat16(), MX_PROBS),
    "padded_mxfp8_gemm_dact": (
        *(*ROWS, *MX_BACK, ENDS, torch.randn(512, 2 * WIDTH).bfloat16(), MX_ACT),
        *(MX_PROBS, True, True),
    ),
    "padded_mxfp8_wgrad": (*COLUMNS, *COLUMNS, ENDS),
    "padded_mxfp8_wgrad_": ([torch.zeros(3, K, K)], *COLUMNS, *COLUMNS, ENDS, True),
}

NV_ROWS, NV_COLUMNS = (
    nvfp4_reference.quantize_rows(torch.randn(512, K).bfloat16(), ENDS, nvfp4(hadamard=True), columnwise)[0]
    for columnwise in (False, True)
)
NV_W, NV_BACK = (
    operand(quantize(w, nvfp4(2), columnwise), nvfp4(2), columnwise) for w, columnwise in ((W1, False), (W2, True))
)
ALPHA = torch.rand(3)

CALLS |= {
    "padded_nvfp4_gemm": (*NV_ROWS, *NV_W, ENDS, ALPHA, torch.randn(3, N).bfloat16(), MX_PROBS),
    "padded_nvfp4_gemm_act": (
        *(*NV_ROWS, *NV_W, ENDS, ALPHA, MX_ACT, torch.randn(3, N).bfloat16(), MX_PROBS),
        True,
    ),
    "padded_nvfp4_gemm_dact": (
        *(*NV_ROWS, *NV_BACK, ENDS, ALPHA, torch.randn(512, 2 * WIDTH).bfloat16(), MX_ACT),
        *(MX_PROBS, True),
    ),
    "padded_nvfp4_wgrad": (*NV_COLUMNS, *NV_COLUMNS, ENDS, ALPHA),
    "padded_nvfp4_wgrad_": ([torch.zeros(3, K, K)], *NV_COLUMNS, *NV_COLUMNS, ENDS, ALPHA, True),
}


KEPT = fp8_reference.kept(PREACT, 2)
QUANTISED = {
    "fp8_grouped_gemm_act": (*CALLS["fp8_grouped_gemm_act"][:-1], True),
    "fp8_grouped_gemm_dact": (
        *CALLS["fp8_grouped_gemm_dact"][:6],
        *KEPT[:2],
        *CALLS["fp8_grouped_gemm_dact"][8:],
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_operator_with_a_kept_pre_activation_is_well_formed(name: str) -> None:
    operator = getattr(torch.ops.fusible_ops, name).default
    torch.library.opcheck(operator, QUANTISED[name], test_utils=("test_faketensor",))


@pytest.mark.parametrize("name", CALLS)
def test_operator_is_well_formed(name: str) -> None:
    """The shape function, by PyTorch's own checker (its check of schemas knows no FP8); operands are left alone."""
    operator = getattr(torch.ops.fusible_ops, name).default
    before = [t.clone() for t in flat(tuple(CALLS[name])) if isinstance(t, torch.Tensor)]
    shares = ({"sm_margin": 4} if name in BOUNDED else {}) | ({"deterministic": False} if name in SUMMED else {})
    assert list(shares) == [a.name for a in operator._schema.arguments if a.kwarg_only]
    for how in ({}, shares):
        torch.library.opcheck(operator, CALLS[name], how, test_utils=("test_faketensor",))
        operator(*CALLS[name], **how)
    after = [t for t in flat(tuple(CALLS[name])) if isinstance(t, torch.Tensor)]
    for a, b in zip(after, before, strict=True):
        assert_bitwise_equal(bits(a), bits(b), name)


def bits(t: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, which can be compared."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def flat(result: object) -> list[torch.Tensor | None]:
    parts = result if isinstance(result, tuple) else (result,)
    return [t for part in parts for t in (flat(part) if isinstance(part, tuple) else [part])]


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, SRELU], ids=lambda activation: activation.kind)
def test_cpu_tensors_get_the_reference(flags: tuple[bool, bool], activation: Activation) -> None:
    """Every function, whatever is asked for; what is not is None."""
    operands = (x.data, x.scale, w1.data, w1.scale, OFFSETS)
    back = (dy.data, dy.scale, w2.data_t, w2.scale_t, OFFSETS, PADDED)
    preact = PREACT[:, : WIDTH * activation.halves].contiguous()
    for module_call in (
        lambda m: m.fp8_quantize(X, OFFSETS, PADDED, *flags, flags[1]),
        lambda m: m.fp8_quantize_weight([W1], flags[1]),
        lambda m: m.fp8_grouped_gemm(*operands),
        lambda m: m.fp8_grouped_gemm_act(*operands, PADDED, activation, None, PROBS, *flags, save_preact=flags[0]),
        lambda m: m.fp8_grouped_gemm_dact(
            *back, preact, activation, PROBS, *flags, need_dprobs=flags[0], need_dbias=flags[1]
        ),
        lambda m: m.fp8_grouped_gemm_act(*operands, PADDED, activation, save_preact=flags[0], quantize_preact=True),
        lambda m: m.fp8_grouped_gemm_dact(
            *back, fp8_reference.kept(preact, activation.halves), activation, PROBS, *flags, need_dprobs=flags[0]
        ),
        lambda m: m.fp8_grouped_wgrad(dy.data_t, dy.scale_t, x.data_t, x.scale_t, PADDED),
    ):
        got, want = flat(module_call(ops)), flat(module_call(fp8_reference))
        assert [t is None for t in got] == [t is None for t in want]
        for a, b in zip(got, want, strict=True):
            if b is not None:
                assert_bitwise_equal(bits(a), bits(b))


def test_shapes_of_copies_are_those_of_the_reference() -> None:
    """Both dimensions of every buffer, for rows and columns that fill no block."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name, call in CALLS.items():
        if name.endswith("_"):
            continue
        operator = getattr(torch.ops.fusible_ops, name).default
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else _faked(mode, t) for t in call))
        for a, b in zip(flat(fake), flat(operator(*call)), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, name


def test_a_squared_relu_has_a_column_for_each_of_its_own() -> None:
    """In MXFP8 and in NVFP4, whose shape functions read the activation."""
    for name, operands in (("mxfp8", (*ROWS, *MX_W[0], ENDS)), ("nvfp4", (*NV_ROWS, *NV_W, ENDS, ALPHA))):
        call = (*operands, SRELU.encode())
        operator = getattr(torch.ops.fusible_ops, f"padded_{name}_gemm_act").default
        torch.library.opcheck(operator, call, test_utils=("test_faketensor",))
        act, *_ = operator(*call)
        assert act.shape == (512, N)


def test_what_has_no_kernel_says_so() -> None:
    """Also on a machine without CUDA: host functions are looked up before anything is launched."""
    with pytest.raises(NotImplementedError, match="fp8_nothing: no CUDA kernel for it is in this version"):
        registry.hopper("fp8_nothing")


def _faked(mode, value):
    return [mode.from_tensor(t) for t in value] if isinstance(value, list) else value
