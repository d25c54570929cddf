"""Every limit refuses its own counterexample, and says what was found, what was wanted and what to do."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import catalog, hopper, ops
from cute_kernels.limits import (
    DTYPES,
    Limit,
    Refusal,
    at_least,
    dtype_name,
    fixed_for,
    given_for,
    installed,
    interleave_fits,
    multiple_of,
    one_of,
    raise_refusal,
)
from cute_kernels.target import CUTLASS_DSL, Target

LIMITS: list[Limit] = [
    multiple_of("K", 8),
    one_of("dtype", DTYPES),
    at_least("G", 1),
    interleave_fits("glu_interleave", "I"),
    interleave_fits("glu_interleave", "I", (32,), plain=False),
    fixed_for("limit", 7.0, "activation", "clamped_swiglu"),
    given_for("limit", "activation", "clamped_swiglu"),
    installed(CUTLASS_DSL),
]

# A call that most kernels take.
LEGAL = {"K": 64, "N": 128, "H": 64, "I": 64, "G": 4, "dtype": "bfloat16", "activation": "swiglu", "glu_interleave": 32}
LEGAL |= {"transposed_weight": False, "limit": None, "alpha": 1.0, "offset": 0.0}


def legal(kernel: catalog.Kernel) -> dict[str, object]:
    """A call that this one takes."""
    return LEGAL | ({"activation": "srelu"} if "srelu" in kernel.name else {})


ROWS = [(kernel, limit) for kernel in catalog.KERNELS.values() for limit in kernel.limits]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_counterexample_is_refused(limit: Limit) -> None:
    refusal = limit.check(limit.counterexample(), rule="r")
    assert refusal is not None and refusal.rule == "r" and refusal.stage == limit.stage
    assert refusal.wanted and refusal.found


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_fact_that_is_not_stated_is_refused(limit: Limit) -> None:
    refusal = limit.check({})
    assert refusal is not None and "is not stated" in str(refusal)


@pytest.mark.parametrize(
    ("limit", "facts", "text"),
    [
        (multiple_of("K", 8), {"K": 12}, "fc1.in_features is 12, needs a multiple of 8"),
        (multiple_of("K", 8), {"K": 0}, "fc1.in_features is 0, needs a multiple of 8"),
        (multiple_of("K", 8, fix="pad it"), {"K": 12}, "fc1.in_features is 12, needs a multiple of 8; pad it"),
        (one_of("dtype", DTYPES), {"dtype": "float32"}, "dtype is float32, needs bfloat16 or float16"),
        (at_least("G", 1), {"G": 0}, "G is 0, needs at least 1"),
        (one_of("arch", ("sm_90a",), stage="target"), {"arch": "sm_80"}, "needs sm_90a; this is sm_80"),
        (
            fixed_for("limit", 7.0, "act", "clamped_swiglu", fix="so it is"),
            {"limit": 5.0, "act": "clamped_swiglu"},
            "limit is 5.0, needs 7.0 with clamped_swiglu; so it is",
        ),
        (installed(CUTLASS_DSL), {CUTLASS_DSL.name: None}, f"needs {CUTLASS_DSL}; it is not installed"),
        (installed(CUTLASS_DSL), {CUTLASS_DSL.name: "4.3.0"}, f"needs {CUTLASS_DSL}; 4.3.0 is installed"),
    ],
)
def test_text(limit: Limit, facts: dict[str, object], text: str) -> None:
    assert str(limit.check(facts, {"K": "fc1.in_features"})) == text


@pytest.mark.parametrize("size", [0, None, 1, 2, 4, 8, 16, 32, 64])
def test_interleave_that_divides_is_taken(size: int | None) -> None:
    assert interleave_fits("glu_interleave", "I").check({"glu_interleave": size, "I": 64}) is None


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (3, "glu_interleave_size is 3, needs None or one of 1, 2, 4, 8, 16, 32, 64, 128"),
        (-1, "glu_interleave_size is -1, needs None or one of 1, 2, 4, 8, 16, 32, 64, 128"),
        (128, "glu_interleave_size is 128, needs a divisor of I (64)"),
    ],
)
def test_interleave_that_does_not_fit(size: int, text: str) -> None:
    assert str(interleave_fits("glu_interleave", "I").check({"glu_interleave": size, "I": 64})) == text


def test_raising_says_the_same() -> None:
    refusal = Refusal("grouped_gemm", "limit", "a multiple of 8", "K is 12")
    with pytest.raises(ValueError, match=r"^grouped_gemm: K is 12, needs a multiple of 8$"):
        raise_refusal(refusal)


def test_unknown_stage_raises() -> None:
    with pytest.raises(ValueError, match="stage is 'later', needs one of: chain"):
        Refusal("r", "later", "a", "b")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_dtype_name(dtype: object) -> None:
    assert dtype_name(dtype) == "bfloat16"


# ----------------------------------------------------------------------------------------------------------------------
# The catalogue


@pytest.mark.parametrize(("kernel", "limit"), ROWS, ids=[f"{kernel.name}: {limit}" for kernel, limit in ROWS])
def test_each_kernel_refuses_the_counterexample_of_each_limit(kernel: catalog.Kernel, limit: Limit) -> None:
    facts = legal(kernel) | limit.counterexample()
    refusals = kernel.unmet_by(facts)
    assert limit.check(facts, rule=kernel.name) in refusals
    with pytest.raises(ValueError, match=f"^{kernel.name}: "):
        kernel.require(**facts)


@pytest.mark.parametrize("name", catalog.KERNELS)
def test_each_kernel_takes_a_legal_call_on_its_own_machine(name: str) -> None:
    kernel = catalog.KERNELS[name]
    assert [str(refusal) for refusal in kernel.unmet_by(legal(kernel))] == (
        [f"{kernel.missing}, needs a later version of this library"] if kernel.missing else []
    )
    assert kernel.unmet_on(Target.named(kernel.arch)) == ()


@pytest.mark.parametrize("name", catalog.KERNELS)
def test_each_kernel_refuses_other_machines(name: str) -> None:
    kernel = catalog.KERNELS[name]
    (refusal,) = kernel.unmet_on(Target.named("sm_80"))
    assert str(refusal) == f"needs {' or '.join(kernel.archs)}; this is sm_80"
    absent = Target(kernel.arch, 1)
    assert [refusal.stage for refusal in kernel.unmet_on(absent)] == ["package"] * len(kernel.packages)


@pytest.mark.parametrize("name", [name for name in catalog.KERNELS if name.startswith("sm_90a/")])
def test_each_hopper_kernel_implements_an_operator_where_the_row_says(name: str) -> None:
    kernel = catalog.KERNELS[name]
    assert callable(getattr(ops, kernel.name))
    assert kernel.module == f"cute_kernels.hopper.{hopper._MODULES[kernel.name]}"
