"""Targets by name and by device, package versions, and where the cache lies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cute_kernels import target
from cute_kernels.target import CUTLASS_DSL, KNOWN_ARCHS, PACKAGES, TVM_FFI, Target


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_named_is_an_ideal_machine(arch: str) -> None:
    machine = Target.named(arch)
    assert machine.arch == str(machine) == arch
    assert machine == Target.named(arch) and hash(machine) == hash(Target.named(arch))
    for package in PACKAGES:
        assert package.fits(machine.version(package.name)), package


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"target is 'sm_90', needs one of: cpu, sm_80, .*sm_90a"):
        Target.named("sm_90")


def test_cpu_is_probed_once() -> None:
    machine = Target.of("cpu")
    assert (machine.arch, machine.sms) == ("cpu", 0)
    assert Target.of(torch.device("cpu")) is machine
    assert {name for name, _ in machine.packages} == {package.name for package in PACKAGES}


def test_a_device_that_is_neither_keeps_its_name() -> None:
    assert Target.of("meta").arch == "meta"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_cuda_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    machine = _fake_gpu(monkeypatch, major=capability[0], minor=capability[1], multi_processor_count=7)
    assert (machine.arch, machine.sms) == (arch, 7)


def test_amd_device_of_capability_9_0_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    machine = _fake_gpu(monkeypatch, major=9, minor=0, multi_processor_count=104, gcnArchName="gfx90a:sramecc+:xnack-")
    assert machine.arch == "gfx90a"


def _fake_gpu(monkeypatch: pytest.MonkeyPatch, **properties: object) -> Target:
    """The target of a CUDA device with these properties."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    monkeypatch.setattr(target, "_probe", target._probe.__wrapped__)
    return Target.of("cuda")


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("4.8.1", True),
        ("4.8", True),
        ("4.8.0.dev1", True),
        ("4.9.0", True),
        ("5.0.0", False),
        ("4.7.9", False),
        (None, False),
        ("", False),
    ],
)
def test_package_range(version: str | None, fits: bool) -> None:
    assert CUTLASS_DSL.fits(version) is fits


def test_package_without_upper_bound() -> None:
    assert TVM_FFI.fits("0.1.15.post2") and TVM_FFI.fits("1.0") and not TVM_FFI.fits("0.1.9")
    assert (str(TVM_FFI), str(CUTLASS_DSL)) == ("apache-tvm-ffi>=0.1.15", "nvidia-cutlass-dsl>=4.8,<5")


def test_package_version() -> None:
    assert target.package_version("torch") == torch.__version__
    assert target.package_version("a-package-that-nobody-has") is None


def test_cache_dir_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(target.CACHE_VARIABLE, str(tmp_path))
    assert target.cache_dir() == tmp_path
    monkeypatch.setenv(target.CACHE_VARIABLE, "~/kernels")
    assert target.cache_dir() == Path.home() / "kernels"
    monkeypatch.delenv(target.CACHE_VARIABLE)
    assert target.cache_dir() == Path.home() / ".cache" / "fusible-ops"
