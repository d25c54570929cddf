"""Doctor: say what this machine has, what it lacks, and which kernels run here.

Exit code 0 if nothing is wrong, 1 if something is (listed last, with what to do). A machine without a GPU is not wrong:
everything runs there, unfused.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fusible_ops
from cute_kernels import cache, target
from cute_kernels.catalog import KERNELS
from cute_kernels.target import PACKAGES, RecordedFile, Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    found = examine()
    print(json.dumps(found, indent=1) if arguments.json else as_text(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """What there is, as dicts, lists, strings, numbers and None. "problems": what is wrong, in words."""
    here = Target.of("cuda" if torch.cuda.is_available() else "cpu")
    runtime, driver_cuda = target.dsl_runtime(), target.driver_cuda()
    files = target.recorded_files()
    found: dict[str, Any] = {
        "fusible_ops": fusible_ops.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "driver": {"version": target.driver_version(), "cuda": driver_cuda and ".".join(map(str, driver_cuda))},
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "packages": [
            {
                "name": package.name,
                "version": here.version(package.name),
                "wanted": str(package),
                "fits": package.fits(here.version(package.name)),
            }
            for package in PACKAGES
        ],
        "dsl": {
            "runtime": runtime and runtime.cuda,
            "files": len(files),
            "wrong": wrong_files(files),
        },
        "linker": target.c_linker(),
        "cache": cache.state(target.cache_dir()),
        "packs": [cache.state(pack, is_pack=True) for pack in target.packs()],
        "arch": here.arch,
        "kernels": [
            {
                "name": kernel.name,
                "archs": list(kernel.archs),
                "lacks": [str(refusal) for refusal in kernel.unmet_on(here)],
            }
            | ({"missing": kernel.missing} if kernel.missing else {})
            for kernel in KERNELS.values()
        ],
    }
    found["problems"] = list(_problems(found))
    return found


def wrong_files(files: Iterable[RecordedFile]) -> list[str]:
    """Files that are not as the wheels say that installed them, in words: changed, missing, or two wheels' at once."""
    claims: dict[Path, list[RecordedFile]] = {}
    for file in files:
        claims.setdefault(file.path, []).append(file)
    wrong = []
    for path, claimed in claims.items():
        packages = " and ".join(sorted({file.package for file in claimed}))
        differ = len({file.sha256 for file in claimed}) > 1
        if not path.exists():
            wrong.append(f"{path} of {packages} is missing")
        elif (now := _sha256(path)) not in {file.sha256 for file in claimed}:
            wrong.append(f"{path} is not the file that {packages} installed")
        elif differ:
            theirs = ", ".join(sorted({file.package for file in claimed if file.sha256 == now}))
            wrong.append(f"{path} belongs to {packages}, with different contents; {theirs} has won")
    return wrong


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def _gpu(index: int) -> dict[str, Any]:
    here = Target.of(torch.device("cuda", index))
    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "arch": here.arch, "sms": here.sms, "bytes": total, "free": free}


def _problems(found: dict[str, Any]) -> Iterable[str]:
    if found["dsl"]["wrong"]:
        yield (
            f"CUTLASS DSL: {len(found['dsl']['wrong'])} files are not as its wheels say, the first: "
            f"{found['dsl']['wrong'][0]}. Wheels were mixed: pip uninstall -y nvidia-cutlass-dsl and all "
            "nvidia-cutlass-dsl-libs-*, then pip install 'fusible-ops[cuda]'"
        )
    for place in (found["cache"], *found["packs"]):
        if place["refused"]:
            yield f"kernels in {place['path']} are not used: {place['refused']}"
    if not found["cache"]["writable"]:
        yield (
            f"{found['cache']['path']} cannot be written: whatever it lacks is compiled at every start; set "
            f"{target.CACHE_VARIABLE} to a directory of your own"
        )
    for kernel in found["kernels"]:
        if found["arch"] in kernel["archs"] and kernel["lacks"]:
            yield f"{kernel['name']} does not run here: {'; '.join(kernel['lacks'])}"
    if found["gpus"] and found["torch"]["cuda"] is None:
        yield "there is a GPU, but this build of torch has no CUDA"


def as_text(found: dict[str, Any]) -> str:
    """The same to read."""
    gpus = [f"{g['name']}, {g['arch']}, {g['sms']} SMs, {g['bytes'] / 2**30:.0f} GiB" for g in found["gpus"]]
    driver, runtime = found["driver"], found["dsl"]["runtime"]
    wrong = found["dsl"]["wrong"]
    rows = [
        ("fusible-ops", f"{found['fusible_ops']}, Python {found['python']}, {found['system']}"),
        ("GPU", "; ".join(gpus) or "none: everything runs unfused"),
        ("driver", f"{driver['version'] or 'none'}, CUDA {driver['cuda'] or 'none'}"),
        ("torch", f"{found['torch']['version']}, CUDA {found['torch']['cuda'] or 'none'}"),
        *((p["name"], _package_text(p)) for p in found["packages"]),
        ("DSL files", f"{found['dsl']['files']} checked, {len(wrong)} wrong; runtime library {runtime or 'none'}"),
        ("C linker", found["linker"] or "none: loading a compiled kernel imports CUTLASS, some seconds"),
        ("cache", _place_text(found["cache"])),
        *(("pack", _place_text(pack)) for pack in found["packs"]),
    ]
    lines = [f"{name:22} {text}" for name, text in rows]
    lines += [f"{'':22} {text}" for text in wrong[:5]]
    lines += ["", f"kernels on {found['arch']}"]
    for kernel in found["kernels"]:
        lacks = [*kernel["lacks"], *([kernel["missing"]] if "missing" in kernel else [])]
        name = f"{kernel['archs'][0]}/{kernel['name']}"
        lines.append(f"  {name:34} {'; '.join(lacks) or 'runs'}")
    lines += (
        ["", *(f"PROBLEM: {text}" for text in found["problems"])] if found["problems"] else ["", "nothing is wrong"]
    )
    return "\n".join(lines)


def _package_text(package: dict[str, Any]) -> str:
    if package["version"] is None:
        return f"not installed (wanted: {package['wanted']})"
    return package["version"] + ("" if package["fits"] else f", not one that is known to work ({package['wanted']})")


def _place_text(place: dict[str, Any]) -> str:
    state = f"{place['entries']} kernels, {place['bytes'] / 2**20:.1f} MiB" + (
        "" if place["writable"] else ", read-only"
    )
    return f"{place['path']}: {state}" + (f"; REFUSED: {place['refused']}" if place["refused"] else "")
