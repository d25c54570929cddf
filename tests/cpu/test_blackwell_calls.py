"""Every call of the Blackwell adapters, compiled for sm_100a and checked by the compiled function, without a GPU.

`tests.call_checks` says how, and why never where there is a driver. One compile a case, 1 to 4 s: cases are chosen
for each use that a rule makes of a kernel. `python -m tests.cpu.test_blackwell_calls` prints each case and its seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import catalog, launch
from cute_kernels import ops as kernels
from cute_kernels.blackwell import host_functions, padded
from patterns import RULES
from tests.blackwell_calls import ACT, CALLS, ENDS, PROBS, W2, WIDTH, WRONG, E, H, M, bf16
from tests.call_checks import as_if_on_blackwell, checked, needs_frontend, needs_no_driver, past_the_driver
from tests.cases import Splits
from tests.models import MLP, Inputs, as_if_on, step

pytestmark = [needs_no_driver, needs_frontend, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True, scope="module")
def fresh() -> None:
    launch.forget()


@pytest.mark.parametrize("name", CALLS)
def test_call_reaches_the_driver(name: str, record_property: Callable[[str, object], None]) -> None:
    check = checked(CALLS[name][1])
    record_property("call", f"{name}: {check.seconds:.1f} s, reached the driver")
    assert check.compiled == 1
    assert checked(CALLS[name][1]).compiled == 0


def test_every_kernel_of_every_rule_is_called() -> None:
    called = {kernel.name for kernel, _ in CALLS.values()}
    assert called == {kernel.name for rows in catalog.SM100.values() for kernel in rows.values()}
    for rule in RULES:
        for bound in rule.kernels:
            assert bound.kernel.arch != "sm_100a" or bound.kernel.name in called


@pytest.mark.parametrize(
    ("activation", "bias", "recipe"),
    [
        ("swiglu", False, None),
        ("scaled_swiglu", False, ops.MXFP8BlockScaling()),
        ("scaled_srelu", True, ops.NVFP4BlockScaling()),
    ],
    ids=["bf16", "mxfp8", "nvfp4"],
)
def test_every_call_of_a_layer_reaches_the_driver(
    activation: str, bias: bool, recipe: ops.Recipe | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step of the module, with the operands that it makes: widths fill no tile, rows no group."""
    for name, function in vars(host_functions()).items():
        monkeypatch.setattr(kernels, name, function)
    splits = Splits("tail", (96, 0, 130, 74), 512)
    mlp = MLP(activation, 160, 96, bias=bias, scale_bias=bias, interleave=32)
    model = mlp.build(splits, "cpu", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
    with past_the_driver() as reached, as_if_on("sm_100a"), ops.autocast(enabled=recipe is not None, recipe=recipe):
        step(model, mlp, inputs)
    assert len(reached) == 6


def test_another_number_of_rows_compiles_nothing() -> None:
    checked(CALLS["BF16 gemm"][1])
    ends = torch.tensor([0, 256, 256, 2048], dtype=torch.int32)
    assert checked(partial(padded.padded_gemm, bf16(2048, WIDTH), [W2], ends)).compiled == 0


def test_the_package_keeps_nothing_for_a_row_count() -> None:
    """As its wrappers would: an entry in a table of a module for every number of rows, for ever."""
    for name in ("BF16 gemm", "BF16 wgrad"):
        checked(CALLS[name][1])
    before = _tables_of_the_package()
    assert any("memo" in name for name in before), "its tables have other names now"
    for rows in (1280, 1536, 1792):
        ends = torch.tensor([0, 256, 256, rows], dtype=torch.int32)
        checked(partial(padded.padded_gemm, bf16(rows, WIDTH), [W2], ends))
        checked(partial(padded.padded_wgrad, bf16(rows, H), bf16(rows, WIDTH), ends))
    assert _tables_of_the_package() == before


def _tables_of_the_package() -> dict[str, int]:
    """How many entries every dictionary of its modules has that is a cache by its name."""
    found = {}
    for module in [m for name, m in sys.modules.items() if name.startswith("cudnn.gemm")]:
        for name, value in vars(module).items():
            if isinstance(value, dict) and any(word in name.lower() for word in ("cache", "memo")):
                found[f"{module.__name__}.{name}"] = len(value)
    return found


def test_no_operation_keeps_memory_that_two_streams_would_share() -> None:
    for name in ("BF16 glu", "BF16 dglu", "MXFP8 quant", "MXFP8 wgrad"):
        checked(CALLS[name][1])
    for made in launch._built.values():
        inner = getattr(made, "_implementation", made)
        scratch = getattr(inner, "_workspace", None)
        own = "Wgrad" in type(inner).__name__  # it is given some at every call
        assert scratch is None or scratch.numel() <= 1 or own, type(inner)


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong is seen: by the row's limits, by the package's host checks, or by the compiled function


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_seen(name: str, record_property: Callable[[str, object], None]) -> None:
    call, text = WRONG[name]
    with as_if_on_blackwell(), pytest.raises((ValueError, TypeError, launch.CompileError), match=text) as error:
        call()
    record_property("call", f"wrong {name}: {str(error.value).splitlines()[0][:120]}")


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
    checked(CALLS["BF16 gemm"][1])
    (made,) = [m for spec, m in launch._built.items() if spec[0] == "GroupedGemmSm100" and _is_plain(spec)]
    right = {"a": ACT, "c": bf16(M, H), "d": bf16(M, H), "padded_offsets": ENDS, "alpha": torch.zeros(E), "b": W2}
    given = list({**right, "b_ptrs": None, "bias": None, "prob": PROBS, "stream": 0, operand: value}.values())
    with as_if_on_blackwell(), pytest.raises((ValueError, TypeError)):
        made._implementation._compiled_kernel(*given)


def _is_plain(spec: tuple) -> bool:
    dtypes, settings = dict(spec[2]), dict(spec[3])
    return (
        spec[1] == (E, H, WIDTH)
        and "bias" not in dtypes
        and dtypes["d"] == torch.bfloat16
        and settings["b_major"] == "k"
    )


def test_before_sm100_they_say_so() -> None:
    with as_if_on_blackwell(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        launch.forget()
        with pytest.raises(RuntimeError, match=r"requires SM100.*found SM90"):
            padded.padded_gemm(ACT, [W2], ENDS)


def main() -> None:
    """The log of the checks; exit status 1 if a wrong call is not seen."""
    began, width, unseen = time.perf_counter(), max(map(len, CALLS)), 0
    for name, (kernel, call) in CALLS.items():
        check = checked(call)
        print(f"{kernel.name:26} {name:{width}} {check.compiled} compiled, {check.seconds:5.1f} s, reached the driver")
    for name, (call, _) in WRONG.items():
        try:
            with as_if_on_blackwell():
                call()
            said = "NOT SEEN"
        except (ValueError, TypeError, launch.CompileError) as error:
            said = str(error).splitlines()[0][:140]
        except RuntimeError as error:
            said = f"NOT SEEN: {str(error).splitlines()[0][:100]}"
        unseen += said.startswith("NOT SEEN")
        print(f"wrong: {name}: {said}")
    seen, seconds = f"{len(WRONG) - unseen} of {len(WRONG)}", time.perf_counter() - began
    print(f"{len(CALLS)} calls reached the driver, {seen} wrong ones were seen, {seconds:.0f} s")
    raise SystemExit(unseen > 0)


if __name__ == "__main__":
    main()
