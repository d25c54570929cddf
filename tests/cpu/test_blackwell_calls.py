"""Every call of the Blackwell adapters, compiled for sm_100a and checked by the compiled function, without a GPU.

`tests.call_checks` says how, and why never where there is a driver. One compile a case, 1 to 4 s: cases are chosen
for each use that a rule makes of a kernel. `python -m tests.cpu.test_blackwell_calls` prints each case and its seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import catalog, launch
from cute_kernels.activation import Activation
from cute_kernels.blackwell import padded
from cute_kernels.blackwell.dglu import dglu
from cute_kernels.blackwell.operands import Operand
from patterns import RULES
from tests.call_checks import as_if_on_blackwell, checked, needs_frontend, needs_no_driver

pytestmark = [needs_no_driver, needs_frontend, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

E, M, H, WIDTH = 4, 1024, 512, 256
ENDS = torch.tensor([256, 512, 512, 1024], dtype=torch.int32)
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 7.0, 1.702, 0.5)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


X, DY, ACT, PREACT, PROBS = bf16(M, H), bf16(M, H), bf16(M, WIDTH), bf16(M, 2 * WIDTH), torch.zeros(M)
W1, B1, W2, B2 = bf16(E, 2 * WIDTH, H), bf16(E, 2 * WIDTH), bf16(E, H, WIDTH), bf16(E, H)

CALLS: dict[str, tuple[catalog.Kernel, Callable[[], Any]]] = {
    "glu": (catalog.SM100_GLU, partial(padded.padded_gemm_act, X, [W1], ENDS, SWIGLU)),
    "glu, clamped, bias, probs": (
        catalog.SM100_GLU,
        partial(padded.padded_gemm_act, X, [W1], ENDS, CLAMPED, B1, PROBS),
    ),
    "gemm": (catalog.SM100_GEMM, partial(padded.padded_gemm, ACT, [W2], ENDS)),
    "gemm, bias, scale": (catalog.SM100_GEMM, partial(padded.padded_gemm, ACT, [W2], ENDS, B2, PROBS)),
    "gemm, input gradient": (catalog.SM100_GEMM, partial(padded.padded_gemm, PREACT, [W1.mT], ENDS)),
    "gemm, FP32 for dprobs": (
        catalog.SM100_GEMM,
        partial(padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, SWIGLU, PROBS, True),
    ),
    "dglu": (catalog.SM100_DGLU, partial(padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, SWIGLU)),
    "dglu, clamped, probs": (
        catalog.SM100_DGLU,
        partial(padded.padded_gemm_dact, DY, [W2], ENDS, PREACT, CLAMPED, PROBS),
    ),
    "dglu, dprobs and dbias by atomics": (
        catalog.SM100_DGLU,
        partial(
            dglu, Operand(DY), Operand(W2.mT), ENDS, PREACT, SWIGLU, PROBS, need_dprobs=True, need_dbias=True,
            deterministic=False,
        ),
    ),
    "wgrad": (catalog.SM100_WGRAD, partial(padded.padded_wgrad, DY, ACT, ENDS)),
    "wgrad, added to FP32": (
        catalog.SM100_WGRAD,
        partial(padded.padded_wgrad_, [torch.zeros(E, H, WIDTH)], DY, ACT, ENDS, True),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def fresh() -> None:
    launch.forget()


@pytest.mark.parametrize("name", CALLS)
def test_call_reaches_the_driver(name: str, record_property: Callable[[str, object], None]) -> None:
    check = checked(CALLS[name][1])
    record_property("seconds", round(check.seconds, 1))
    assert check.compiled == 1
    assert checked(CALLS[name][1]).compiled == 0


def test_every_kernel_of_every_rule_is_called() -> None:
    called = {kernel.name for kernel, _ in CALLS.values()}
    for rule in RULES:
        for bound in rule.kernels:
            assert bound.kernel.arch != "sm_100a" or bound.kernel.missing or bound.kernel.name in called


def test_another_number_of_rows_compiles_nothing() -> None:
    checked(CALLS["gemm"][1])
    ends = torch.tensor([0, 256, 256, 2048], dtype=torch.int32)
    assert checked(partial(padded.padded_gemm, bf16(2048, WIDTH), [W2], ends)).compiled == 0


def test_no_operation_keeps_memory_that_two_streams_would_share() -> None:
    for _, call in CALLS.values():
        checked(call)
    for made in launch._built.values():
        inner = getattr(made, "_implementation", made)
        scratch = getattr(inner, "_workspace", None)
        assert scratch is None or scratch.numel() <= 1, type(inner)


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong is seen: by the package's host checks before the compile, or by the compiled function


def _gemm(**wrong: Tensor) -> Callable[[], Any]:
    given = {"x": ACT, "weight": W2, "ends": ENDS, "bias": B2, "bias_scale": PROBS} | wrong
    return lambda: padded.gemm(*given.values())


def shifted(t: Tensor) -> Tensor:
    """The same at an address that is no multiple of 16 bytes."""
    room = torch.zeros(t.numel() + 1, dtype=t.dtype)
    return room[1:].view(t.shape)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "shape: rows that are no multiple of 256": (
        _gemm(x=bf16(1000, WIDTH), bias_scale=torch.zeros(1000)),
        "256-aligned",
    ),
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
        partial(padded.padded_gemm_act, X, [W1], ENDS, Activation("clamped_swiglu", 10.0, 1.702, 0.5)),
        "limit is 10.0, needs 7.0 with clamped_swiglu; it is built into",
    ),
    "constants: a GeGLU by gelu_tanh": (
        partial(padded.padded_gemm_act, X, [W1], ENDS, Activation("geglu")),
        "activation is geglu, needs swiglu or clamped_swiglu; cuDNN Frontend's geglu is the clamped SwiGLU",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_seen(name: str) -> None:
    call, text = WRONG[name]
    with as_if_on_blackwell(), pytest.raises((ValueError, TypeError, launch.CompileError), match=text):
        call()


@pytest.mark.parametrize(
    ("operand", "value"),
    [
        ("a", bf16(M + 8, WIDTH)),
        ("a", ACT.float()),
        ("a", bf16(WIDTH, M).t()),
        ("b", bf16(E, H, WIDTH + 8)),
        ("padded_offsets", ENDS.long()),
        ("alpha", torch.zeros(E + 1)),
    ],
    ids=["rows", "dtype", "stride", "width", "int64", "experts"],
)
def test_the_compiled_function_itself_sees_it(operand: str, value: Tensor) -> None:
    """Past every check of the package: the function that was compiled for a right call is given a wrong operand."""
    checked(CALLS["gemm"][1])
    (made,) = [m for spec, m in launch._built.items() if spec[0] == "GroupedGemmSm100" and _is_plain(spec)]
    right = {"a": ACT, "c": bf16(M, H), "d": bf16(M, H), "padded_offsets": ENDS, "alpha": torch.zeros(E), "b": W2}
    given = list({**right, "b_ptrs": None, "bias": None, "prob": PROBS, "stream": 0, operand: value}.values())
    with as_if_on_blackwell(), pytest.raises((ValueError, TypeError)):
        made._implementation._compiled_kernel(*given)


def _is_plain(spec: tuple) -> bool:
    return "bias" not in dict(spec[2]) and dict(spec[2])["d"] == torch.bfloat16 and dict(spec[3])["b_major"] == "k"


def test_before_sm100_they_say_so() -> None:
    with as_if_on_blackwell(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        launch.forget()
        with pytest.raises(RuntimeError, match=r"requires SM100.*found SM90"):
            padded.padded_gemm(ACT, [W2], ENDS)


def main() -> None:
    """The log of the checks."""
    for name, (kernel, call) in CALLS.items():
        check = checked(call)
        print(f"{kernel.name:12} {name:36} {check.compiled} compiled, {check.seconds:5.1f} s, reached the driver")
    for name, (call, _) in WRONG.items():
        try:
            with as_if_on_blackwell():
                call()
        except (ValueError, TypeError, launch.CompileError) as error:
            print(f"refused: {name}: {str(error).splitlines()[0][:140]}")


if __name__ == "__main__":
    main()
