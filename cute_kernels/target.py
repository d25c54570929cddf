"""What a kernel may run on: architecture, multiprocessors, package versions.

The one file that reads the environment, asks a device what it is, or asks which packages are installed. Everything else
is given a `Target`, so planning and explaining need no GPU and no CUTLASS.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

CACHE_VARIABLE = "FUSIBLE_OPS_CACHE_DIR"
PACKS_VARIABLE = "FUSIBLE_OPS_KERNELS"
TRACER_VARIABLE = "NVTX_INJECTION64_PATH"  # Nsight Systems and Compute set it where they want NVTX ranges

# Multiprocessors of a common product of each architecture: A100, A40, L40S, H100 and H200, B200, B300, RTX PRO 6000.
KNOWN_ARCHS: Mapping[str, int] = {
    "cpu": 0,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90a": 132,
    "sm_100a": 148,
    "sm_103a": 148,
    "sm_120a": 188,
}


@dataclass(frozen=True)
class Package:
    """A distribution and the versions that are known to work: `at_least <= version < below`, by leading numbers.

    `tested` is the exact version that the tests ran with. `below=None` means no upper bound.
    """

    name: str
    tested: str
    at_least: tuple[int, ...]
    below: tuple[int, ...] | None = None

    def fits(self, version: str | None) -> bool:
        """Whether the installed `version` is one of those; `None` (not installed) is not."""
        if version is None:
            return False
        numbers = _numbers(version)
        return self.at_least <= numbers and (self.below is None or numbers < self.below)

    def __str__(self) -> str:
        upper = "" if self.below is None else f",<{_dotted(self.below)}"
        return f"{self.name}>={_dotted(self.at_least)}{upper}"


DSL_WHEELS = tuple(f"nvidia-cutlass-dsl{part}" for part in ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13"))
CUTLASS_DSL = Package("nvidia-cutlass-dsl", "4.8.1", (4, 8), (5,))  # 4.7 has no cutlass.memory
TVM_FFI = Package("apache-tvm-ffi", "0.1.15", (0, 1, 15))
# Before NVIDIA/cudnn-frontend#654 its SM100 quant, srelu and dsrelu kernels could overwrite sums that they had not read
# yet (#652). 1.32 reads first, and its calls are those that the adapters make.
CUDNN_FRONTEND = Package("nvidia-cudnn-frontend", "1.32.0", (1, 32), (1, 33))
TRANSFORMER_ENGINE = Package("transformer-engine", "2.20.2", (2, 20), (2, 21))
PACKAGES = (CUTLASS_DSL, TVM_FFI, CUDNN_FRONTEND, TRANSFORMER_ENGINE)


@dataclass(frozen=True)
class Target:
    """A machine as the planner sees it.

    arch: "cpu", "sm_80", "sm_90a", "sm_100a", ...; for a device that is neither, the type of the device.
    sms: streaming multiprocessors, 0 on a CPU.
    packages: (name, version) for each row of `PACKAGES`; `None` where it is not installed.
    """

    arch: str
    sms: int = 0
    packages: tuple[tuple[str, str | None], ...] = ()

    @staticmethod
    def named(arch: str) -> Target:
        """An ideal machine of that architecture: the packages at their tested versions. `ValueError` if unknown."""
        if arch not in KNOWN_ARCHS:
            raise ValueError(f"target is {arch!r}, needs one of: {', '.join(KNOWN_ARCHS)}")
        return Target(arch, KNOWN_ARCHS[arch], tuple((package.name, package.tested) for package in PACKAGES))

    @staticmethod
    def of(device: torch.device | str) -> Target:
        """The machine that `device` belongs to, as it is. Probed once per device and process."""
        device = torch.device(device)
        index = device.index
        if device.type == "cuda" and index is None:
            index = torch.cuda.current_device()
        return _probe(device.type, index if device.type == "cuda" else None)

    def version(self, package: str) -> str | None:
        """The version of a package on this machine; `None` if it is not there."""
        return dict(self.packages).get(package)

    def facts(self) -> dict[str, object]:
        """The same as facts for a `Limit`: "arch", "sms", and each package by name."""
        absent = {package.name: None for package in PACKAGES}
        return {"arch": self.arch, "sms": self.sms, **absent, **dict(self.packages)}

    def __str__(self) -> str:
        return self.arch


@functools.cache
def _probe(device_type: str, index: int | None) -> Target:
    packages = tuple((package.name, package_version(package.name)) for package in PACKAGES)
    if device_type != "cuda":
        return Target(device_type, 0, packages)
    mixed = mixed_wheels()
    if mixed:
        packages = tuple((name, mixed if name == CUTLASS_DSL.name else version) for name, version in packages)
    properties = torch.cuda.get_device_properties(index)
    return Target(_arch(properties), properties.multi_processor_count, packages)


def _arch(properties: object) -> str:
    """The architecture that kernels are compiled for. AMD devices answer with capabilities such as 9.0 too."""
    if torch.version.hip is not None:
        return str(getattr(properties, "gcnArchName", "rocm")).split(":")[0]
    major, minor = getattr(properties, "major", 0), getattr(properties, "minor", 0)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def package_version(name: str) -> str | None:
    """The installed version of a distribution, `None` if there is none."""
    found = next(iter(importlib.metadata.distributions(name=name)), None)
    return None if found is None else found.version


def cache_dir() -> Path:
    """Where compiled kernels are kept: $FUSIBLE_OPS_CACHE_DIR, else ~/.cache/fusible-ops. Read at every call."""
    place = os.environ.get(CACHE_VARIABLE)
    return Path(place).expanduser() if place else Path.home() / ".cache" / "fusible-ops"


def packs() -> tuple[Path, ...]:
    """Directories of kernels that were compiled beforehand: $FUSIBLE_OPS_KERNELS, separated as in $PATH. As above."""
    return tuple(Path(place).expanduser() for place in os.environ.get(PACKS_VARIABLE, "").split(os.pathsep) if place)


def c_linker() -> str | None:
    """A command that links C object files, if there is one."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@dataclass(frozen=True)
class DslRuntime:
    """The library of CUTLASS DSL that compiled kernels call, and the CUDA version that it is for ("cu13")."""

    cuda: str
    path: Path


@functools.cache
def dsl_runtime() -> DslRuntime | None:
    """The one that CUTLASS DSL itself takes: the newest that is installed and that the driver, if any, can run."""
    name = "libcute_dsl_runtime.so"
    root = _distribution_folder(CUTLASS_DSL.name)
    folders = sorted(root.glob(f"nvidia_cutlass_dsl/cu[0-9]*/lib/{name}"), reverse=True) if root else []
    newest = driver_cuda()
    for path in folders:
        cuda = path.parents[1].name
        if newest is None or int(cuda.removeprefix("cu")) <= newest[0]:
            return DslRuntime(cuda, path)
    return None


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The CUDA version of the NVIDIA driver, (13, 0) say; None where there is none."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_version() -> str | None:
    """The version of the NVIDIA driver, "580.65.06" say; None where there is none, or not on Linux."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\d+\.\d+(\.\d+)*", line)
    return found.group() if found else None


@dataclass(frozen=True)
class RecordedFile:
    """A file as a wheel's RECORD states it. sha256: as there, in base64."""

    package: str
    path: Path
    sha256: str


def recorded_files(names: Iterable[str] = DSL_WHEELS) -> list[RecordedFile]:
    """Every file that these distributions say they have installed, by the RECORDs of their wheels."""
    found = []
    for name in names:
        for distribution in itertools.islice(importlib.metadata.distributions(name=name), 1):
            for file in distribution.files or ():
                if file.hash is not None and file.hash.mode == "sha256":
                    found.append(RecordedFile(name, Path(str(distribution.locate_file(file))), file.hash.value))
    return found


def mixed_wheels(names: Iterable[str] = DSL_WHEELS) -> str | None:
    """In words, that two of these distributions have installed different files at one path, if they have: wheels for
    several CUDA versions did that to each other. From their RECORDs alone; a hash of what is there has the last word.
    """
    claims: dict[Path, RecordedFile] = {}
    for file in recorded_files(names):
        other = claims.setdefault(file.path, file)
        if other.sha256 != file.sha256:
            return f"a mix of {other.package} and {file.package} (both wrote {file.path}; see fusible-ops doctor)"
    return None


def _distribution_folder(name: str) -> Path | None:
    """Where a distribution is installed."""
    found = next(iter(importlib.metadata.distributions(name=name)), None)
    return None if found is None else Path(str(found.locate_file("")))


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Within it the environment variable has this value, for libraries that take a setting in no other way; afterwards
    it is as before.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@functools.cache
def is_traced() -> bool:
    """Whether a tool that shows NVTX ranges started this process. Looked up once."""
    return TRACER_VARIABLE in os.environ


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "4.8.1" -> (4, 8, 1), "0.1.15.post2" -> (0, 1, 15)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in leading.group().split(".")) if leading else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
