"""Delayed scaling: the formula of an update, step by step, and what a history is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from cute_kernels.quantization.formats import E4M3, E5M2
from fusible_ops.delayed_scaling import DelayedScales, loaded_scales, saved_scales, update_all
from fusible_ops.groups import Groups
from fusible_ops.quantizer import Quantizer
from fusible_ops.recipe import DelayedScaling

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def scales_of(recipe: DelayedScaling, tensors: int = 1, element=E4M3) -> DelayedScales:
    scales = DelayedScales.fresh(tensors, recipe.amax_history_len, CPU)
    scales.use(recipe, element, CPU)
    return scales


def step(scales: DelayedScales, *amax: float) -> list[float]:
    """One step that sees `amax`; the scales after it."""
    scales.note(torch.tensor(amax), slice(None))
    scales.update()
    return scales.scale.tolist()


@pytest.mark.parametrize(("element", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scale_follows_the_largest_of_the_history(element, largest: float) -> None:
    scales = scales_of(DelayedScaling(margin=2, amax_history_len=3), element=element)
    assert scales.scale.item() == 1
    seen = [4.0, 8.0, 2.0, 1.0, 0.5, 0.25]
    for i, amax in enumerate(seen):
        (scale,) = step(scales, amax)
        assert scale == largest / max(seen[max(0, i - 2) : i + 1]) / 4


def test_most_recent_and_functions() -> None:
    scales = scales_of(DelayedScaling(amax_compute_algo="most_recent"))
    assert [step(scales, amax)[0] for amax in (4.0, 1.0)] == [112, 448]
    scales = scales_of(DelayedScaling(amax_compute_algo=lambda history: history[0] * 2))
    assert step(scales, 4.0) == [56]
    scales = scales_of(
        DelayedScaling(
            margin=3, scaling_factor_compute_algo=lambda amax, old, top, recipe: old + amax + top + recipe.margin
        )
    )
    assert step(scales, 4.0) == [1 + 4 + 448 + 3]


def test_the_scale_stays_where_there_is_nothing_to_go_by() -> None:
    scales = scales_of(DelayedScaling(amax_history_len=1), 4)
    assert step(scales, 2.0, 2.0, 2.0, 1e-44) == [224, 224, 224, torch.finfo(torch.float32).max]
    assert step(scales, 0.0, INF, NAN, 4.0) == [224, 224, 224, 112]


def test_a_step_keeps_the_largest_of_several_notes() -> None:
    scales = scales_of(DelayedScaling(), 2)
    scales.note(torch.tensor([1.0, 7.0]), slice(None))
    scales.note(torch.tensor([3.0, NAN]), slice(None))
    assert scales.amax_history[0].tolist() == [3, 7]


def test_the_history_takes_another_length() -> None:
    """The recent part is kept, and so is what this step has seen."""
    scales = scales_of(DelayedScaling(amax_history_len=4))
    for amax in (1.0, 2.0, 3.0):
        step(scales, amax)
    scales.note(torch.tensor([9.0]), slice(None))
    assert scales.amax_history.flatten().tolist() == [9, 1, 2, 3]
    for length, wanted in ((2, [9, 3]), (5, [9, 0, 0, 0, 3]), (1, [9])):
        scales.use(DelayedScaling(amax_history_len=length), E4M3, CPU)
        assert scales.amax_history.flatten().tolist() == wanted


def test_updates_are_in_place() -> None:
    """A captured graph keeps reading and writing the same memory."""
    scales = scales_of(DelayedScaling())
    before = scales.scale.data_ptr(), scales.amax_history.data_ptr()
    step(scales, 3.0)
    assert (scales.scale.data_ptr(), scales.amax_history.data_ptr()) == before


def test_quantizer_uses_the_old_scale_and_notes_the_new_amax() -> None:
    """One scale for each group: input0, weight0, input1, weight1; rows of no group are not seen."""
    scales = scales_of(DelayedScaling(amax_history_len=2), 4)
    scales.scale.copy_(torch.tensor([2.0, 4.0, 8.0, 16.0]))
    x = torch.tensor([[3.0, -5.0], [1.0, 0.0], [60.0, 1.0], [NAN, INF]])
    groups = Groups.of(torch.tensor([2, 1]), 4, CPU)
    inputs, weights = (Quantizer(scales.recipe.operand_format("input"), scales, first, 2) for first in (0, 1))
    q = inputs.rows(x, groups, columnwise=False)
    assert q.rowwise.data.float().tolist() == [[6, -10], [2, 0], [448, 8], [0, 0]]  # saturates: 60 · 8 > 448
    assert q.rowwise.scale.tolist() == [0.5, 0.125]
    w = weights.matrices(torch.tensor([[[1.0]], [[7.0]]]))
    assert w.rowwise.data.float().flatten().tolist() == [4, 112]
    assert scales.amax_history[0].tolist() == [5, 1, 60, 7]
    one = scales_of(DelayedScaling(amax_history_len=2))
    assert Quantizer(inputs.format, one).rows(x, groups).rowwise.scale.tolist() == [1, 1]
    assert one.amax_history[0].tolist() == [60]


def test_the_size_of_what_is_saved_is_that_of_the_scales() -> None:
    """Not of where they lie in memory: a checkpoint of shards is loaded only into a state of its size."""

    def saved(*amax: float) -> torch.Tensor:
        scales = {"forward": scales_of(recipes[0], 2), "backward": scales_of(recipes[1], 2, E5M2)}
        for each in scales.values():
            step(each, *amax)
        return saved_scales(scales)

    # Of a configuration's file each has a string of its own.
    recipes = [DelayedScaling(amax_history_len=2, amax_compute_algo="".join(["most_", "recent"])) for _ in range(2)]
    first, again, other = saved(1.0, 2.0), saved(1.0, 2.0), saved(1e-30, INF)
    recipes[1] = recipes[0]
    assert torch.equal(first, again) and torch.equal(first, saved(1.0, 2.0)) and len(first) == len(other)
    wide = torch.arange(8.0)
    part = DelayedScales(wide[::4], wide.view(2, 4)[:, 1:3])
    loaded = loaded_scales(saved_scales({"forward": part}), {"forward": 2}, "op")["forward"]
    assert loaded.scale.tolist() == [0, 4] and loaded.amax_history.tolist() == [[1, 2], [5, 6]]


def _rank(rank: int, store: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shared = scales_of(DelayedScaling(amax_history_len=2), 2)
    own = scales_of(DelayedScaling(amax_history_len=2, reduce_amax=False))
    shared.note(torch.tensor([1.0, 8.0] if rank else [2.0, 4.0]), slice(None))
    own.note(torch.tensor([1.0 + rank]), slice(None))
    update_all([shared, own])
    results[rank] = (shared.scale.tolist(), own.scale.tolist())
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_ranks_share_their_largest_magnitudes(tmp_path) -> None:
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"), results), nprocs=2)
        assert dict(results) == {0: ([224, 56], [448]), 1: ([224, 56], [224])}
