"""Source distribution and wheel: what is in them, and that they install into a bare environment and work there.

Only torch is taken from the environment of the tests, by its path, which brings no editable installation along.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import fusible_ops
from cute_kernels.target import PACKAGES as PACKAGES_WITH_VERSIONS
from tests.house.sources import PACKAGES, ROOT

BUILD = "from setuptools import build_meta; build_meta.build_{kind}({folder!r})"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from a copy of what a clone has, and unpacked."""
    folder = tmp_path_factory.mktemp("package")
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "site", "*.egg-info")
    shutil.copytree(ROOT, folder / "clone", ignore=skipped)
    _python(BUILD.format(kind="sdist", folder=str(folder)), folder / "clone")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"fusible_ops-{fusible_ops.__version__}"


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel that the source distribution makes."""
    _python(BUILD.format(kind="wheel", folder=str(source.parent)), source)
    return next(source.parent.glob("*.whl"))


def _python(program: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_source_distribution_has_the_packages_and_no_tests(source: Path) -> None:
    for package in PACKAGES:
        files = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
        assert files == {path.relative_to(source) for path in (source / package).rglob("*.py")}
    assert (source / "docs" / "design.md").exists() and (source / "LICENSE").exists()
    assert not (source / "tests").exists()


def test_wheel_holds_the_packages_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name.split("/")[0] for name in names if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    kinds = {Path(name).suffix for name in names if not name.startswith(info)}
    assert kinds == {".py", ".typed"}
    assert metadata["Version"] == fusible_ops.__version__ and metadata["Name"] == "fusible-ops"
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(need.partition(">")[0] for need in needs) == ["filelock", "torch"]


def test_wheel_works_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*install, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(torch.__file__).parents[1]), "HOME": str(tmp_path)}
    where = subprocess.run(
        [python, "-c", "import fusible_ops; print(fusible_ops.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "bare")
    for command in (
        [python, str(ROOT / "examples" / "quickstart.py")],
        [tmp_path / "bare" / "bin" / "fusible-ops", "warmup", "64,32,4", "--out", "pack", "--list"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "grouped_gemm" in done.stdout, done.stdout + done.stderr


NEIGHBOURS = {
    "flash-attn-4 4.0.0b36": ["nvidia-cutlass-dsl>=4.6.2", "apache-tvm-ffi<0.2,>=0.1.11"],
    "quack-kernels 0.6.5": ["nvidia-cutlass-dsl>=4.7", "apache-tvm-ffi<0.2,>=0.1.6"],
}
"""What other packages with kernels in the CUTLASS DSL need of it (their METADATA)."""


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_there_are_versions_that_a_neighbour_takes_as_well(neighbour: str) -> None:
    """One environment for both, with the versions that the tests run with; ours says no more than its kernels need."""
    versions = dict(line.split(";")[0].split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    extra = re.search(r"^cuda = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    ours = {wanted.name: wanted.specifier for wanted in map(Requirement, json.loads(extra[1]))}
    for wanted in map(Requirement, NEIGHBOURS[neighbour]):
        assert (wanted.specifier & ours[wanted.name]).contains(versions[wanted.name].strip())
        accepted = next(package for package in PACKAGES_WITH_VERSIONS if package.name == wanted.name)
        for version in ("4.7.1", "4.8.0", "4.8.1", "4.9.0", "5.0") if "dsl" in wanted.name else ("0.1.14", "0.1.15"):
            assert ours[wanted.name].contains(version) == accepted.fits(version), version
