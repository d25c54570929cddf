"""fusible_ops -> patterns -> cute_kernels: who may import whom, read from the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.sources import OPTIONAL, PACKAGES, ROOT, imports_any, module, name, python_files

FORBIDDEN = [
    # folder, what none of its files may import
    ("cute_kernels", ("patterns", "fusible_ops")),
    ("cute_kernels/hopper", ("patterns", "fusible_ops", "cute_kernels.blackwell")),
    ("cute_kernels/blackwell", ("patterns", "fusible_ops", "cute_kernels.hopper")),
    ("patterns", ("fusible_ops", "torch.nn", "cutlass", "transformer_engine")),
    ("fusible_ops", ("cutlass", "cuda", "tvm_ffi", "cudnn")),
]


@pytest.mark.parametrize(("folder", "modules"), FORBIDDEN, ids=[folder for folder, _ in FORBIDDEN])
def test_arrows_go_down_only(folder: str, modules: tuple[str, ...]) -> None:
    wrong = {name(path): found for path in python_files(folder) if (found := imports_any(path, *modules))}
    assert not wrong, f"{folder} may not import {', '.join(modules)}: {wrong}"


def device_side() -> dict[str, Path]:
    """Files that import CUTLASS at their top, every *_kernel.py and every epilogue, by module name."""
    return {
        module(path): path
        for path in python_files(*PACKAGES)
        if path.stem.endswith("_kernel")
        or path.parent.name == "epilogues"
        or imports_any(path, "cutlass", module_level_only=True)
    }


def test_device_side_lies_in_an_architecture_and_imports_no_torch() -> None:
    for path in device_side().values():
        assert len(path.relative_to(ROOT / "cute_kernels").parts) > 1, f"{name(path)}: device code belongs in a folder"
        found = imports_any(path, "torch")
        assert not found, f"{name(path)} is device code (it imports CUTLASS), so it may not import {found}"


def test_host_side_loads_device_side_and_optional_packages_when_first_used() -> None:
    device = device_side()
    for path in python_files(*PACKAGES):
        if path in device.values():
            continue
        found = imports_any(path, *OPTIONAL, *device, module_level_only=True)
        assert not found, f"{name(path)} imports {found} at module level; import it where it is first used"
