"""Which recipe is active, when, and what leaving does."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.quantization.formats import E4M3
from fusible_ops.autocast_mode import (
    autocast,
    current_model_init,
    current_recipe,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    quantized_model_init,
    use_in_forward,
)
from fusible_ops.delayed_scaling import DelayedScales
from fusible_ops.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

BLOCK, CURRENT = Float8BlockScaling(), Float8CurrentScaling()


def used_scales(amax: float) -> DelayedScales:
    """Scales that a forward has just used and that saw `amax`."""
    scales = DelayedScales.fresh(1, 4, torch.device("cpu"))
    scales.use(DelayedScaling(amax_history_len=4), E4M3, torch.device("cpu"))
    scales.note(torch.tensor([amax]), slice(None))
    use_in_forward(scales)
    return scales


def test_the_innermost_counts_and_the_outer_comes_back() -> None:
    assert current_recipe() is None
    with autocast(recipe=BLOCK):
        assert current_recipe() == BLOCK
        with autocast(recipe=CURRENT):
            assert current_recipe() == CURRENT
            with autocast(enabled=False, recipe=BLOCK):
                assert current_recipe() is None
            assert current_recipe() == CURRENT
        assert current_recipe() == BLOCK
    assert current_recipe() is None


def test_the_default_recipe() -> None:
    with autocast():
        assert current_recipe() == get_default_recipe() == DelayedScaling()


def test_one_instance_again_and_again_but_not_in_itself() -> None:
    again = autocast(recipe=BLOCK)
    for _ in range(2):
        with again:
            assert current_recipe() == BLOCK
            with pytest.raises(RuntimeError, match="entered already; nest another instance"):
                again.__enter__()
    assert current_recipe() is None


def test_an_exception_restores_the_recipe_and_updates_nothing() -> None:
    with pytest.raises(KeyError), autocast(recipe=BLOCK), autocast(recipe=CURRENT):
        scales = used_scales(7.0)
        raise KeyError
    assert current_recipe() is None and scales.scale.item() == 1


def test_leaving_the_outermost_updates_what_was_used() -> None:
    with autocast(), autocast():
        scales = used_scales(7.0)
        use_in_forward(scales)
        with autocast(enabled=False):
            pass
        assert scales.scale.item() == 1
    assert scales.scale.item() == 448 / 7
    with autocast():
        pass
    assert scales.scale.item() == 448 / 7 and scales.amax_history.tolist() == [[0], [0], [0], [7]]


def test_nothing_is_updated_where_no_gradients_are_recorded() -> None:
    with torch.no_grad(), autocast():
        scales = used_scales(7.0)
    assert scales.scale.item() == 1


@pytest.mark.parametrize("make", [lambda: autocast(recipe="fp8"), lambda: quantized_model_init(recipe=4).__enter__()])
def test_a_recipe_is_a_recipe(make) -> None:
    with pytest.raises(TypeError, match=r"recipe must be a fusible_ops recipe such as Float8BlockScaling"):
        make()


@pytest.mark.parametrize("make", [autocast, lambda enabled: quantized_model_init(enabled).__enter__()])
@pytest.mark.parametrize("enabled", [Float8BlockScaling(), None, "no", 1])
def test_enabled_is_a_bool(make, enabled) -> None:
    """A recipe given by position would be lost."""
    with pytest.raises(TypeError, match=r"enabled must be a bool, got .*; a recipe is given by name: recipe="):
        make(enabled)


def test_calibrating_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="calibrating=True is not supported"):
        autocast(enabled=False, calibrating=True)


def test_model_init_nests() -> None:
    assert current_model_init() is None
    with quantized_model_init(recipe=BLOCK, preserve_high_precision_init_val=True):
        made = current_model_init()
        assert made is not None and made.recipe == BLOCK and made.preserve_high_precision_init_val
        with quantized_model_init(enabled=False):
            assert current_model_init() is None
        assert current_model_init() == made
    with pytest.raises(KeyError), quantized_model_init():
        raise KeyError
    assert current_model_init() is None


def test_availability() -> None:
    for ask in (is_fp8_available, is_fp8_block_scaling_available):
        assert ask() is True and ask(return_reason=True) == (True, "")
