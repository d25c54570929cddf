"""Calls of the Blackwell adapters: one or more for every use that a rule makes of a kernel, and where there is no rule.

Values do not matter, so operands are zero; shapes, dtypes, strides and addresses are those of a small layer: four
groups of 1024 padded rows, one of them empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels import catalog
from cute_kernels.activation import Activation
from cute_kernels.blackwell import padded, padded_mxfp8, padded_nvfp4
from cute_kernels.blackwell.dense import dense_srelu, dense_swiglu
from cute_kernels.blackwell.dglu import dglu
from cute_kernels.blackwell.glu import glu
from cute_kernels.blackwell.glu_hadamard import glu_hadamard
from cute_kernels.blackwell.operands import Operand
from cute_kernels.blackwell.quant import quant
from cute_kernels.blackwell.srelu import dsrelu, srelu
from cute_kernels.blackwell.wgrad import wgrad

E, M, H, WIDTH = 4, 1024, 512, 256
ENDS = torch.tensor([256, 512, 512, 1024], dtype=torch.int32)
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 7.0, 1.702, 0.5)
BUILT_IN = Activation("clamped_swiglu", 7.0, 1.702, 1.0)
OTHER_CLAMP = Activation("clamped_swiglu", 10.0, 1.0, 0.0)
SRELU, TANH_SRELU = Activation("srelu"), Activation("tanh_srelu", clamp_scale=5.0)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _scale(dtype: torch.dtype, *shape: int) -> Tensor:
    """Room for swizzled scales of [..., rows, blocks]."""
    *lead, rows, blocks = shape
    return torch.zeros(*lead, -(-rows // 128) * 128, -(-blocks // 4) * 4, dtype=torch.uint8).view(dtype)


def mxfp8(*shape: int) -> Operand:
    """[..., rows, K] in blocks along K."""
    *lead, rows, k = shape
    return Operand(torch.zeros(shape, dtype=torch.uint8).view(E4M3), _scale(E8M0, *lead, rows, k // 32))


def mxfp8_columns(rows: int, columns: int) -> Operand:
    """[rows, columns] in blocks along the rows."""
    return Operand(mxfp8(rows, columns).data, _scale(E8M0, columns, rows // 32))


def mxfp8_back(experts: int, n: int, k: int) -> Operand:
    """A weight [experts, n, k] from its column-wise copy, for products that sum over n: [experts, k, n]."""
    return Operand(mxfp8(experts, n, k).data.mT, _scale(E8M0, experts, k, n // 32))


def nvfp4(*shape: int) -> Operand:
    *lead, rows, k = shape
    return Operand(torch.zeros(*lead, rows, k // 2, dtype=torch.uint8), _scale(E4M3, *lead, rows, k // 16))


X, DY, ACT, PREACT, PROBS = bf16(M, H), bf16(M, H), bf16(M, WIDTH), bf16(M, 2 * WIDTH), torch.zeros(M)
W1, B1, W2, B2 = bf16(E, 2 * WIDTH, H), bf16(E, 2 * WIDTH), bf16(E, H, WIDTH), bf16(E, H)
ALPHA = torch.ones(E)
BF16, MX, NV = (catalog.SM100[format] for format in catalog.FORMATS)
MX_GRAD = {"probs": PROBS, "need_dprobs": True, "dpreact_dtype": E4M3}
NV_GRAD = {"probs": PROBS, "need_dprobs": True, "alpha": ALPHA}
MX_DY, NV_DY, MX_W2_BACK = mxfp8(M, H), nvfp4(M, H), mxfp8_back(E, H, WIDTH)
NV_X, NV_W1, NV_W2_BACK = nvfp4(M, H), nvfp4(E, 2 * WIDTH, H), nvfp4(E, WIDTH, H)

Call = Callable[[], Any]
CALLS: dict[str, tuple[catalog.Kernel, Call]] = {
    "BF16 glu": (BF16["glu"], partial(padded.padded_gemm_act, X, [W1], ENDS, SWIGLU)),
    "BF16 glu: clamp, bias, probs": (BF16["glu"], partial(padded.padded_gemm_act, X, [W1], ENDS, CLAMPED, B1, PROBS)),
    "BF16 gemm": (BF16["gemm"], partial(padded.padded_gemm, ACT, [W2], ENDS)),
    "BF16 gemm: bias, scale": (BF16["gemm"], partial(padded.padded_gemm, ACT, [W2], ENDS, B2, PROBS)),
    "BF16 gemm: input gradient": (BF16["gemm"], partial(padded.padded_gemm, PREACT, [W1.mT], ENDS)),
    "BF16 gemm: into FP32, for dprobs": (
        BF16["gemm"],
        partial(padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, SWIGLU, PROBS, True),
    ),
    "BF16 dglu": (BF16["dglu"], partial(padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, SWIGLU)),
    "BF16 dglu: clamp, probs": (
        BF16["dglu"],
        partial(padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, CLAMPED, PROBS),
    ),
    "BF16 dglu: dprobs, dbias by atomics": (
        BF16["dglu"],
        partial(
            padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, SWIGLU, PROBS, need_dprobs=True, need_dbias=True,
            deterministic=False,
        ),
    ),
    "BF16 wgrad": (BF16["wgrad"], partial(padded.padded_wgrad, DY, ACT, ENDS)),
    "BF16 wgrad: added to FP32": (
        BF16["wgrad"],
        partial(padded.padded_wgrad_, [torch.zeros(E, H, WIDTH)], DY, ACT, ENDS, True),
    ),
    "BF16 dense swiglu": (BF16["dense_swiglu"], partial(dense_swiglu, Operand(X), Operand(W1[0]))),
    "MXFP8 glu": (MX["glu"], partial(glu, mxfp8(M, H), mxfp8(E, 2 * WIDTH, H), ENDS, SWIGLU, PROBS, act_dtype=E4M3)),
    "MXFP8 glu: any clamp, bias": (
        MX["glu"],
        partial(glu, mxfp8(M, H), mxfp8(E, 2 * WIDTH, H), ENDS, OTHER_CLAMP, PROBS, B1, act_dtype=E4M3),
    ),
    "MXFP8 quant": (MX["gemm"], partial(quant, mxfp8(M, WIDTH), mxfp8(E, H, WIDTH), ENDS)),
    "MXFP8 quant: bias": (MX["gemm"], partial(quant, mxfp8(M, WIDTH), mxfp8(E, H, WIDTH), ENDS, B2)),
    "MXFP8 quant: bias, scale": (MX["gemm"], partial(quant, mxfp8(M, WIDTH), mxfp8(E, H, WIDTH), ENDS, B2, PROBS)),
    "MXFP8 quant: input gradient": (
        MX["gemm"],
        partial(quant, mxfp8(M, 2 * WIDTH), mxfp8_back(E, 2 * WIDTH, H), ENDS),
    ),
    "MXFP8 quant: into FP8": (MX["gemm"], partial(quant, mxfp8(M, WIDTH), mxfp8(E, H, WIDTH), ENDS, dtype=E4M3)),
    "MXFP8 dglu": (MX["dglu"], partial(dglu, MX_DY, MX_W2_BACK, ENDS, PREACT, SWIGLU, **MX_GRAD)),
    "MXFP8 dglu: any clamp": (MX["dglu"], partial(dglu, MX_DY, MX_W2_BACK, ENDS, PREACT, OTHER_CLAMP, **MX_GRAD)),
    "MXFP8 dglu: dprobs, dbias by atomics": (
        MX["dglu"],
        partial(
            padded_mxfp8.padded_mxfp8_gemm_dact, *MX_DY, *MX_W2_BACK, ENDS, PREACT, SWIGLU, PROBS, need_dprobs=True,
            need_dbias=True, deterministic=False,
        ),
    ),
    "MXFP8 quant: from a column-wise weight, for a bias gradient": (
        MX["gemm"],
        partial(padded_mxfp8.padded_mxfp8_gemm_dact, *MX_DY, *MX_W2_BACK, ENDS, PREACT, SWIGLU, need_dbias=True),
    ),
    "MXFP8 wgrad": (MX["wgrad"], partial(wgrad, mxfp8_columns(M, H), mxfp8_columns(M, WIDTH), ENDS)),
    "MXFP8 wgrad: added to FP32": (
        MX["wgrad"],
        partial(
            padded_mxfp8.padded_mxfp8_wgrad_, [torch.zeros(E, H, WIDTH)], *mxfp8_columns(M, H),
            *mxfp8_columns(M, WIDTH), ENDS, True,
        ),
    ),
    "MXFP8 srelu: bias": (
        MX["srelu"],
        partial(srelu, mxfp8(M, H), mxfp8(E, WIDTH, H), ENDS, SRELU, PROBS, bf16(E, WIDTH), act_dtype=E4M3),
    ),
    "MXFP8 dsrelu": (MX["dsrelu"], partial(dsrelu, MX_DY, MX_W2_BACK, ENDS, ACT, SRELU, **MX_GRAD)),
    "MXFP8 srelu: tanh, as a rule calls it": (
        MX["srelu"],
        partial(padded_mxfp8.padded_mxfp8_gemm_act, *mxfp8(M, H), *mxfp8(E, WIDTH, H), ENDS, TANH_SRELU),
    ),
    "MXFP8 dsrelu: tanh, as a rule calls it": (
        MX["dsrelu"],
        partial(padded_mxfp8.padded_mxfp8_gemm_dact, *MX_DY, *MX_W2_BACK, ENDS, ACT, TANH_SRELU, PROBS, True),
    ),
    "MXFP8 dense swiglu": (MX["dense_swiglu"], partial(dense_swiglu, mxfp8(M, H), mxfp8(2 * WIDTH, H))),
    "MXFP8 dense srelu": (
        MX["dense_srelu"],
        partial(dense_srelu, mxfp8(M, H), mxfp8(WIDTH, H), PROBS, act_dtype=E4M3),
    ),
    "NVFP4 glu": (NV["glu"], partial(glu, nvfp4(M, H), nvfp4(E, 2 * WIDTH, H), ENDS, SWIGLU, PROBS, alpha=ALPHA)),
    "NVFP4 glu, rotated maxima: bias": (
        NV["glu_hadamard"],
        partial(glu_hadamard, nvfp4(M, H), nvfp4(E, 2 * WIDTH, H), ENDS, SWIGLU, PROBS, B1, ALPHA),
    ),
    "NVFP4 glu, rotated maxima: its clamp": (
        NV["glu_hadamard"],
        partial(padded_nvfp4.padded_nvfp4_gemm_act, *NV_X, *NV_W1, ENDS, ALPHA, BUILT_IN, None, PROBS, False),
    ),
    "NVFP4 glu: any clamp, bias": (
        NV["glu"],
        partial(padded_nvfp4.padded_nvfp4_gemm_act, *NV_X, *NV_W1, ENDS, ALPHA, OTHER_CLAMP, B1, PROBS, True),
    ),
    "NVFP4 quant: bias, scale": (
        NV["gemm"],
        partial(padded_nvfp4.padded_nvfp4_gemm, *nvfp4(M, WIDTH), *nvfp4(E, H, WIDTH), ENDS, ALPHA, B2, PROBS),
    ),
    "NVFP4 quant: input gradient": (
        NV["gemm"],
        partial(padded_nvfp4.padded_nvfp4_gemm, *nvfp4(M, 2 * WIDTH), *nvfp4(E, H, 2 * WIDTH), ENDS, ALPHA),
    ),
    "NVFP4 dglu: any clamp": (
        NV["dglu"],
        partial(padded_nvfp4.padded_nvfp4_gemm_dact, *NV_DY, *NV_W2_BACK, ENDS, ALPHA, PREACT, OTHER_CLAMP),
    ),
    "NVFP4 wgrad: added to FP32": (
        NV["wgrad"],
        partial(
            padded_nvfp4.padded_nvfp4_wgrad_, [torch.zeros(E, H, WIDTH)], *nvfp4(H, M), *nvfp4(WIDTH, M), ENDS, ALPHA,
            True,
        ),
    ),
    "NVFP4 srelu: bias": (
        NV["srelu"],
        partial(padded_nvfp4.padded_nvfp4_gemm_act, *NV_X, *nvfp4(E, WIDTH, H), ENDS, ALPHA, SRELU, bf16(E, WIDTH)),
    ),
    "NVFP4 dsrelu": (
        NV["dsrelu"],
        partial(padded_nvfp4.padded_nvfp4_gemm_dact, *NV_DY, *NV_W2_BACK, ENDS, ALPHA, ACT, SRELU, PROBS, True),
    ),
    "NVFP4 quant": (NV["gemm"], partial(quant, nvfp4(M, WIDTH), nvfp4(E, H, WIDTH), ENDS, alpha=ALPHA)),
    "NVFP4 dglu": (NV["dglu"], partial(dglu, NV_DY, nvfp4(E, WIDTH, H), ENDS, PREACT, SWIGLU, **NV_GRAD)),
    "NVFP4 wgrad": (NV["wgrad"], partial(wgrad, nvfp4(H, M), nvfp4(WIDTH, M), ENDS, global_scales=(ALPHA, ALPHA))),
    "NVFP4 srelu: tanh": (
        NV["srelu"],
        partial(srelu, nvfp4(M, H), nvfp4(E, WIDTH, H), ENDS, TANH_SRELU, PROBS, alpha=ALPHA),
    ),
    "NVFP4 dsrelu: tanh": (
        NV["dsrelu"],
        partial(dsrelu, NV_DY, nvfp4(E, WIDTH, H), ENDS, ACT, TANH_SRELU, **NV_GRAD),
    ),
    "NVFP4 dense swiglu": (NV["dense_swiglu"], partial(dense_swiglu, nvfp4(M, H), nvfp4(2 * WIDTH, H))),
    "NVFP4 dense srelu": (NV["dense_srelu"], partial(dense_srelu, nvfp4(M, H), nvfp4(WIDTH, H), PROBS)),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong


def shifted(t: Tensor) -> Tensor:
    """The same at an address that is no multiple of 16 bytes."""
    room = torch.zeros(t.numel() + 1, dtype=t.dtype)
    return room[1:].view(t.shape)


def _gemm(**wrong: Tensor) -> Call:
    given = {"x": ACT, "weight": W2, "ends": ENDS, "bias": B2, "bias_scale": PROBS} | wrong
    return lambda: padded.gemm(*given.values())


def _quant(**wrong: Any) -> Call:
    given: dict[str, Any] = {"x": mxfp8(M, WIDTH), "weight": mxfp8(E, H, WIDTH), "ends": ENDS} | wrong
    return lambda: quant(**given)


def _nvfp4_act(**wrong: Any) -> Call:
    """A squared ReLU in NVFP4, whose matrices have three dimensions."""
    given: dict[str, Any] = {"x": NV_X, "weight": nvfp4(E, WIDTH, H), "ends": ENDS, "activation": SRELU, "alpha": ALPHA}
    return lambda: srelu(**given | wrong)


def _short(x: Operand) -> Operand:
    assert x.scale is not None
    return Operand(x.data, x.scale[:-128].contiguous())


WRONG: dict[str, tuple[Call, str]] = {
    "shape: rows, no multiple of 256": (_gemm(x=bf16(1000, WIDTH), bias_scale=torch.zeros(1000)), "256-aligned"),
    "shape: another K": (_gemm(x=bf16(M, WIDTH + 8)), "K dimension|shape suffix"),
    "shape: too few ends": (_gemm(ends=ENDS[:3].clone()), "padded_offsets"),
    "shape: a bias of another width": (_gemm(bias=bf16(E, H + 8)), "bias"),
    "shape: a scale of other rows": (_gemm(bias_scale=torch.zeros(M + 256)), "prob"),
    "dtype: FP16 operands": (_gemm(x=ACT.half(), weight=W2.half()), "dtype is float16, needs bfloat16"),
    "dtype: FP64 scale": (_gemm(bias_scale=PROBS.double()), "prob"),
    "dtype: int64 ends": (_gemm(ends=ENDS.long()), "padded_offsets"),
    "stride: rows with a gap": (_gemm(x=bf16(M, 2 * WIDTH)[:, :WIDTH]), "stride|contiguous|compact"),
    "stride: a weight that is neither": (_gemm(weight=bf16(E, H, 2 * WIDTH)[:, :, :WIDTH]), "must be contiguous"),
    "alignment: x": (_gemm(x=shifted(ACT)), "16-byte aligned"),
    "alignment: ends, a view past a leading zero": (_gemm(ends=torch.cat([ENDS[:1], ENDS])[1:]), "16-byte aligned"),
    "width: GLU columns that are no multiple of 64": (
        partial(padded.padded_gemm_act, X, [bf16(E, 96, H)], ENDS, SWIGLU),
        "I is 48, needs a multiple of 32; gate and up lie in blocks of 32 columns",
    ),
    "constants: another clamp": (
        partial(padded.padded_gemm_act, X, [W1], ENDS, OTHER_CLAMP),
        "limit is 10.0, needs 7.0 with clamped_swiglu; it is built into",
    ),
    "constants: a GeGLU by gelu_tanh": (
        partial(padded.padded_gemm_act, X, [W1], ENDS, Activation("geglu")),
        "activation is geglu, needs swiglu or clamped_swiglu; cuDNN Frontend's geglu is the clamped SwiGLU",
    ),
    "MXFP8 shape: rows, no multiple of 256": (_quant(x=mxfp8(1000, WIDTH)), r"a\.shape\[0\]|divisib|256"),
    "MXFP8 shape: another K": (_quant(x=mxfp8(M, WIDTH + 32)), "x is mxfp8 and has 288 columns, weight mxfp8 and 256"),
    "MXFP8 shape: too few scales": (_quant(x=_short(mxfp8(M, WIDTH))), "x: 7168 scales are given, needs 8192"),
    "MXFP8 dtype: a weight in another format": (_quant(weight=Operand(W2, mxfp8(E, H, WIDTH).scale)), "dtype"),
    "MXFP8 dtype: scales of another format": (
        _quant(weight=Operand(mxfp8(E, H, WIDTH).data, nvfp4(E, H, 2 * WIDTH).scale)),
        "x is mxfp8 and has 256 columns, weight nvfp4 and 256",
    ),
    "MXFP8 dtype: int64 ends": (_quant(ends=ENDS.long()), "padded_offsets|int32|Int32|int64|dtype|tracing|compile"),
    "MXFP8 stride: rows with a gap": (
        _quant(x=Operand(mxfp8(M, 2 * WIDTH).data[:, :WIDTH], mxfp8(M, WIDTH).scale)),
        r"x: strides are \(512, 1\)",
    ),
    "NVFP4 alignment: x": (
        partial(quant, Operand(shifted(nvfp4(M, WIDTH).data), nvfp4(M, WIDTH).scale), nvfp4(E, H, WIDTH), ENDS),
        "align",
    ),
    "MXFP8 wgrad: other rows of dy": (
        partial(wgrad, mxfp8_columns(M + 256, H), mxfp8_columns(M, WIDTH), ENDS),
        "dy has 1280 rows, x 1024",
    ),
    "NVFP4 wgrad: no global scales": (partial(wgrad, nvfp4(H, M), nvfp4(WIDTH, M), ENDS), "global_scale"),
    "NVFP4 shape: too few scales": (_nvfp4_act(x=_short(NV_X)), "x: 28672 scales are given, needs 32768"),
    "NVFP4 shape: rows, no multiple of 256": (_nvfp4_act(x=nvfp4(1000, H)), r"a\.shape\[0\]|divisib|256"),
    "NVFP4 shape: another K": (_nvfp4_act(x=nvfp4(M, H + 32)), "x is nvfp4 and has 544 columns, weight nvfp4 and 512"),
    "NVFP4 shape: alpha of other experts": (_nvfp4_act(alpha=torch.ones(E + 1)), "alpha"),
    "NVFP4 dtype: a weight in MXFP8": (
        _nvfp4_act(weight=mxfp8(E, WIDTH, H)),
        "x is nvfp4 and has 512 columns, weight mxfp8 and 512",
    ),
    "NVFP4 dtype: int64 ends": (_nvfp4_act(ends=ENDS.long()), "padded_offsets|int32|Int32|int64|dtype|tracing|compile"),
    "NVFP4 activation: not squared": (
        _nvfp4_act(activation=Activation("relu")),
        "activation is relu, needs srelu or tanh_srelu",
    ),
    "NVFP4 constants: rotated maxima of another clamp": (
        partial(glu_hadamard, NV_X, NV_W1, ENDS, OTHER_CLAMP, alpha=ALPHA),
        "limit is 10.0, needs 7.0 with clamped_swiglu; it is built into",
    ),
    "NVFP4 width": (
        partial(quant, nvfp4(M, 48), nvfp4(E, H, 48), ENDS),
        "cudnn_quant_nvfp4: K is 48, needs a multiple of 32",
    ),
}  # fmt: skip
