"""The host side of the grouped products without a GPU: what it refuses, what it allocates, what it would launch."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.activation import Activation
from cute_kernels.hopper import device_table, rowwise
from cute_kernels.hopper import grouped_gemm as host
from cute_kernels.hopper.configs import sms_left

BF16 = torch.bfloat16
SWIGLU = Activation("swiglu")
T, G, N, K = 40, 3, 64, 24
OFFSETS = torch.tensor([0, 10, 10, 33], dtype=torch.int32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(options, arguments) of every launch; nothing runs."""
    found: list[tuple] = []

    def kernel(module: str, options: object, arch: str):
        return lambda *arguments: found.append((options, arguments))

    monkeypatch.setattr(host, "multiprocessors", lambda kernel, device, sm_margin=0: sms_left(132, sm_margin))
    monkeypatch.setattr(host.launch, "kernel", kernel)
    monkeypatch.setattr(host.launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(device_table, "device_table", lambda values, device, stream, arch: torch.tensor(values))
    return found


def rows(columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(T, columns, dtype=dtype)


def stacked(n: int = N, k: int = K) -> list[torch.Tensor]:
    return [torch.zeros(G, n, k, dtype=BF16)]


def test_a_product_is_one_launch(launched: list) -> None:
    y = host.grouped_gemm(rows(K), stacked(), OFFSETS, torch.zeros(G, N, dtype=BF16), torch.zeros(T))
    ((options, (x, w, table, offsets, counter, outputs, amaxes, grid, stream)),) = launched
    assert (options.kind, options.has_bias, options.factor, options.separate) == ("store", True, "float32", False)
    assert table is counter is amaxes is None and outputs[0] is y and (grid, stream) == (3, 7)
    assert y.shape == (T, N) and offsets is OFFSETS and x.shape == (T, K) and w.shape == (G, N, K)


def test_a_product_into_a_buffer_whose_tail_another_zeroes(launched: list) -> None:
    y = rows(N)
    host.grouped_gemm_act(rows(K), stacked(), OFFSETS, SWIGLU, None, None, 8, zero_tail=False, zero_tail_of=y)
    assert host.grouped_gemm_(y, rows(K), stacked(), OFFSETS) is None
    (first, (*_, later)), (second, (result, *_)) = [(options, given[5]) for options, given in launched]
    assert (first.zero_tail, first.zeroes_later, second.zero_tail) == (False, True, False)
    assert later is y and result is y


def test_a_scale_without_a_bias_is_not_passed(launched: list) -> None:
    host.grouped_gemm(rows(K), stacked(), OFFSETS, None, torch.zeros(T))
    assert launched[0][0].factor == "" and launched[0][1][5][1:] == (None, None)


@pytest.mark.parametrize("separate", [False, True])
def test_weights_stored_transposed_are_read_where_they_are(launched: list, separate: bool) -> None:
    """Forward reads them as the others' gradient does, and the other way round."""
    buffer, preact = torch.zeros(G, K, N, dtype=BF16), rows(2 * K)
    weights = [w.mT for w in buffer] if separate else [buffer.mT]
    host.grouped_gemm(rows(K), weights, OFFSETS)
    host.grouped_gemm_dgrad(rows(N), weights, OFFSETS)
    host.grouped_gemm_act(rows(K), weights, OFFSETS, Activation("srelu"))
    host.grouped_gemm_dact(rows(N), weights, OFFSETS, preact, Activation("swiglu"))
    assert [options.contracts_rows for options, _ in launched] == [True, False, True, False]
    for _, (_, w, *_) in launched:
        assert w.shape[-2:] == (K, N) and w.is_contiguous() and w.data_ptr() == buffer.data_ptr()
    with pytest.raises(ValueError, match="glu_interleave is 8, needs 0 for weights stored"):
        host.grouped_gemm_dgrad(rows(N), weights, OFFSETS, 8)
    with pytest.raises(ValueError, match="contiguous, or all of them transposed views"):
        host.grouped_gemm(rows(K), [*weights[:-1], torch.zeros(G, N, 2 * K, dtype=BF16)[..., ::2]][-1:], OFFSETS)
    assert len(launched) == 4


@pytest.mark.parametrize("block", [0, 1, 8, 32])
def test_a_gated_activation_leaves_its_input_as_stored_columns_lie(launched: list, block: int) -> None:
    """The kernel takes the columns of a weight stored [K, N] as they are, and knows no rows."""
    wide = 2 * 64
    weights = [torch.zeros(G, K, wide, dtype=BF16).mT]
    act, preact = host.grouped_gemm_act(
        rows(K), weights, OFFSETS, SWIGLU, glu_interleave=block, preact_interleave=block
    )
    assert (act.shape, preact.shape) == ((T, wide // 2), (T, wide))
    dy = rows(N)
    host.grouped_gemm_dact(dy, [torch.zeros(G, N, 64, dtype=BF16)], OFFSETS, preact, SWIGLU, preact_interleave=block)
    assert [(options.preact_interleave, options.glu_interleave) for options, _ in launched] == [(block, 0)] * 2
    with pytest.raises(ValueError, match=rf"preact_interleave is 16, needs {block} for weights stored \[K, N"):
        host.grouped_gemm_act(rows(K), weights, OFFSETS, SWIGLU, glu_interleave=block, preact_interleave=16)
    with pytest.raises(ValueError, match=r"preact_interleave is 8, needs 0 for weights stored \[N, K"):
        host.grouped_gemm_act(rows(K), stacked(), OFFSETS, SWIGLU, glu_interleave=8, preact_interleave=8)


def test_separate_weights_become_distances_from_the_lowest(launched: list) -> None:
    buffer = torch.zeros(4, N, K, dtype=BF16)
    weights = [buffer[3], buffer[0], buffer[2]]
    host.grouped_gemm(rows(K), weights, OFFSETS)
    ((options, (_, base, table, *_)),) = launched
    assert options.separate and base.data_ptr() == buffer.data_ptr()
    assert table.tolist() == [3 * N * K * 2 // 16, 0, 2 * N * K * 2 // 16]


def test_weights_too_far_apart_are_refused(launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_table, "addresses", lambda weights: (0, 16 * 2**31, 32))
    with pytest.raises(ValueError, match="32 GiB"):
        host.grouped_gemm(rows(K), [torch.zeros(N, K, dtype=BF16) for _ in range(G)], OFFSETS)
    assert not launched


def test_results_have_the_reference_shapes(launched: list) -> None:
    assert host.grouped_gemm_dgrad(rows(N), stacked(), OFFSETS, 8).shape == (T, K)
    act, preact = host.grouped_gemm_act(rows(K), stacked(), OFFSETS, SWIGLU, glu_interleave=8)
    assert (act.shape, preact.shape) == ((T, N // 2), (T, N))
    act, preact = host.grouped_gemm_act(rows(K), stacked(), OFFSETS, Activation("srelu"), save_preact=False)
    assert act.shape == (T, N) and preact is None
    assert [options.glu_interleave for options, _ in launched] == [8, 8, 0]
    dpreact, act, dprobs = host.grouped_gemm_dact(
        rows(N), stacked(), OFFSETS, rows(2 * K), SWIGLU, torch.zeros(T), True, True
    )
    assert (dpreact.shape, act.shape, dprobs.shape, dprobs.dtype) == ((T, 2 * K), (T, K), (T,), torch.float32)
    dpreact, act, dprobs = host.grouped_gemm_dact(
        rows(N), stacked(), OFFSETS, rows(K), Activation("gelu"), need_act=False
    )
    assert dpreact.shape == (T, K) and act is None and dprobs is None


def test_no_rows_is_no_launch(launched: list) -> None:
    none = torch.zeros(0, K, dtype=BF16)
    offsets = torch.zeros(G + 1, dtype=torch.int32)
    assert host.grouped_gemm(none, stacked(), offsets).shape == (0, N)
    dy = torch.zeros(0, N, dtype=BF16)
    results = host.grouped_gemm_dact(
        dy, stacked(), offsets, torch.zeros(0, 2 * K, dtype=BF16), SWIGLU, None, True, True
    )
    assert [result.shape[0] for result in results] == [0, 0, 0]
    assert not launched


def test_rows_that_tma_cannot_address_are_copied(launched: list) -> None:
    x = torch.zeros(T, K + 4, dtype=BF16)[:, :K]
    host.grouped_gemm(x, stacked(), OFFSETS)
    assert launched[0][1][0].stride() == (K, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: host.grouped_gemm(rows(K + 8), stacked(), OFFSETS), r"x is bfloat16 \[40, 32\].*needs.*\[40, 24\]"),
        (lambda: host.grouped_gemm(rows(20), stacked(k=20), OFFSETS), "K is 20, needs a multiple of 8"),
        (lambda: host.grouped_gemm(rows(K), [], OFFSETS), "weights starts with"),
        (lambda: host.grouped_gemm(rows(K), stacked() * 2, OFFSETS), "weights starts with"),
        (lambda: host.grouped_gemm(rows(K), [stacked()[0][0]] * 2, OFFSETS), "weights has 2 tensors"),
        (lambda: host.grouped_gemm(rows(K, torch.float32), stacked(), OFFSETS), "x is float32"),
        (lambda: host.grouped_gemm(rows(K), stacked(), OFFSETS.long()), "offsets"),
        (lambda: host.grouped_gemm(rows(K), stacked(), OFFSETS, torch.zeros(G, 8, dtype=BF16)), "bias"),
        (lambda: host.grouped_gemm(rows(K), [stacked()[0].transpose(1, 2)], OFFSETS), "x is bfloat16"),
        (lambda: host.grouped_gemm(rows(K), stacked(), OFFSETS, sm_margin=-1), "sm_margin is -1"),
        (lambda: host.grouped_gemm(rows(K), stacked(), OFFSETS, sm_margin=132), "sm_margin is 132, needs 0 to 131"),
        (lambda: host.grouped_gemm(rows(K), stacked(), OFFSETS, counter=OFFSETS), r"counter is int32 \[4\]"),
        (lambda: host.grouped_gemm_(rows(K), rows(K), stacked(), OFFSETS), r"out is bfloat16 \[40, 24\].*\[40, 64\]"),
        (lambda: host.grouped_gemm_(rows(2 * N)[:, :N], rows(K), stacked(), OFFSETS), "out needs to be contiguous"),
        (lambda: host.grouped_gemm_act(rows(K), stacked(), OFFSETS, SWIGLU, zero_tail_of=rows(20)), "zero_tail_of is"),
        (lambda: host.grouped_gemm_dgrad(rows(N), stacked(), OFFSETS, 3), "glu_interleave is 3"),
        (lambda: host.grouped_gemm_act(rows(K), stacked(), OFFSETS, SWIGLU, glu_interleave=128), "glu_interleave"),
        (lambda: host.grouped_gemm_act(rows(K), stacked(), OFFSETS, SWIGLU, probs=torch.zeros(3)), "probs"),
        (lambda: host.grouped_gemm_dact(rows(N), stacked(), OFFSETS, rows(K), SWIGLU), "preact"),
        (
            lambda: host.grouped_gemm_act(
                rows(K), [torch.zeros(G, K, N, dtype=BF16).mT], OFFSETS, SWIGLU, glu_interleave=2, preact_interleave=2
            ),
            "transposed_weight is True, needs False with glu_interleave_size 2",
        ),
        (
            lambda: host.grouped_gemm_dact(rows(N), stacked(), OFFSETS, rows(2 * K), SWIGLU, preact_interleave=16),
            "preact_interleave is 16, needs 0, or .* one of 1, 8, 16, 32 that divides I .24",
        ),
    ],
)
def test_refusals_name_the_argument_and_come_before_any_launch(launched: list, call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
    assert not launched


def test_group_offsets_clear_at_most_256_counters(launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "multiprocessors", lambda kernel, device: 132)
    sizes = torch.tensor([3, 0, 6])
    offsets, zeros = rowwise.group_offsets_and_counters(sizes, 11, 256)
    ((options, given),) = launched
    assert (
        options.counts
        and not options.padded
        and given[1] is offsets
        and given[2] is None
        and given[3] is zeros
        and zeros.shape == (256,)
    )
    with pytest.raises(ValueError, match="group_offsets: counters is 257, needs at most 256"):
        rowwise.group_offsets_and_counters(sizes, 11, 257)
    assert len(launched) == 1


@pytest.mark.parametrize("multiple", [1, 32, 128])
def test_groups_are_padded_to_the_multiple_that_is_asked_for(
    launched: list, monkeypatch: pytest.MonkeyPatch, multiple: int
) -> None:
    monkeypatch.setattr(rowwise, "multiprocessors", lambda kernel, device: 132)
    offsets, padded = rowwise.padded_group_offsets(torch.tensor([4, 7]), 11, multiple)
    assert len(launched) == 1 and offsets.shape == padded.shape == (3,)
    assert launched[0][1][-3:] == (11, multiple, 7)  # rows, multiple, stream
    for wrong in (0, -32, 129):
        with pytest.raises(ValueError, match=f"multiple is {wrong}, needs 1 to 128"):
            rowwise.padded_group_offsets(torch.tensor([4]), 4, wrong)
