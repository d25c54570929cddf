"""What `fusible-ops doctor` finds wrong, and how `fusible-ops bench` reports and compares."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cute_kernels import target
from cute_kernels.target import RecordedFile
from fusible_ops.bench.grouped_mlp import PARTS, Shape
from fusible_ops.bench.report import Report, Row, chart, slower
from fusible_ops.cli import doctor, main
from fusible_ops.cli.models import mlp


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No hashing of large libraries, and a cache directory of its own."""
    monkeypatch.setattr(target, "recorded_files", lambda *names: [])
    monkeypatch.setattr(target, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path


def recorded(path: Path, package: str, content: bytes) -> RecordedFile:
    return RecordedFile(package, path, base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode())


def test_a_machine_without_a_gpu_is_not_wrong(quick: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [] and found["cache"]["entries"] == 0
    names = {kernel["name"] for kernel in found["kernels"]}
    assert {"grouped_gemm_act", "grouped_wgrad"} <= names
    assert main(["doctor"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


def test_mixed_wheels_are_named(tmp_path: Path):
    """Two wheels that write one path, with different contents, as the CUDA 12 and 13 libraries once did."""
    shared, alone, gone = tmp_path / "libcute.so", tmp_path / "alone.py", tmp_path / "gone.py"
    shared.write_bytes(b"for cuda 12")
    alone.write_bytes(b"edited")
    wrong = doctor.wrong_files(
        [
            recorded(shared, "dsl-libs-base", b"for cuda 12"),
            recorded(shared, "dsl-libs-cu13", b"for cuda 13"),
            recorded(alone, "dsl", b"as it was"),
            recorded(gone, "dsl", b""),
        ]
    )
    assert wrong == [
        f"{shared} belongs to dsl-libs-base and dsl-libs-cu13, with different contents; dsl-libs-base has won",
        f"{alone} is not the file that dsl installed",
        f"{gone} of dsl is missing",
    ]
    shared.write_bytes(b"of neither")
    assert "is not the file" in doctor.wrong_files([recorded(shared, "a", b"1"), recorded(shared, "b", b"2")])[0]
    assert doctor.wrong_files([recorded(alone, "dsl", b"edited"), recorded(alone, "twin", b"edited")]) == []


def test_files_of_installed_wheels_are_found():
    files = target.recorded_files(["pytest"])
    assert any(file.path.name == "METADATA" or file.path.suffix == ".py" for file in files)
    python = [file for file in files if file.path.suffix == ".py"][:20]
    assert doctor.wrong_files(python) == []


def test_mixed_wheels_are_refused_by_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rule then says so, and the chain runs unfused."""
    assert target.mixed_wheels() is None, "the wheels that the tests run with are in order"
    for name, content in (("nvidia-cutlass-dsl-libs-base", "AAAA"), ("nvidia-cutlass-dsl-libs-cu13", "BBBB")):
        info = tmp_path / f"{name.replace('-', '_')}-4.4.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4.4.0\n")
        (info / "RECORD").write_text(f"nvidia_cutlass_dsl/lib/libcute.so,sha256={content},3\nsame.py,sha256=CCCC,3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = target.mixed_wheels()
    assert found is not None and "libs-base and nvidia-cutlass-dsl-libs-cu13" in found and "libcute.so" in found
    hopper = target.Target.named("sm_90a")
    packages = tuple((name, found if name == "nvidia-cutlass-dsl" else version) for name, version in hopper.packages)
    said = mlp(64, 64, 4).explain(replace(hopper, packages=packages))
    assert "needs nvidia-cutlass-dsl>=4.8,<5; a mix of nvidia-cutlass-dsl-libs-base" in said and "0 of 3 ops" in said


def test_wrong_things_set_the_exit_code(quick: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (quick / "cache").mkdir()
    (quick / "cache").chmod(0o777)
    monkeypatch.setenv(target.PACKS_VARIABLE, str(quick / "absent"))
    monkeypatch.setattr(target, "recorded_files", lambda *names: [recorded(quick / "gone", "dsl", b"")])
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert f"chmod go-w {quick / 'cache'}" in said
    assert f"{quick / 'absent'} are not used: there is no such directory" in said
    assert "Wheels were mixed" in said and "gone of dsl is missing" in said


def test_a_gpu_whose_packages_are_missing_is_wrong(quick: Path, monkeypatch: pytest.MonkeyPatch):
    hopper = replace(target.Target.named("sm_90a"), packages=())
    monkeypatch.setattr(target.Target, "of", lambda device: hopper)
    problems = doctor.examine()["problems"]
    assert any("grouped_gemm does not run here: needs nvidia-cutlass-dsl" in problem for problem in problems)


# Bench


REPORT = Report(
    "NVIDIA H200",
    "2026-11-30",
    {"torch": "2.11.0", "nvidia-cutlass-dsl": "4.8.1"},
    [
        Row("64,32,4,128", "forward", "ours", 1.0, 700.0, 1.0),
        Row("64,32,4,128", "forward", "torch", 1.2, 583.0, 1.2),
        Row("64,32,4,128", "forward", "<peer>", 1.1, 636.0, 1.1),
    ],
)


def test_a_report_survives_its_file(tmp_path: Path):
    REPORT.write(tmp_path / "run.json")
    assert Report.read(tmp_path / "run.json") == REPORT
    (tmp_path / "run.json").write_text('{"gpu": "x"}')
    with pytest.raises(ValueError, match="is no report"):
        Report.read(tmp_path / "run.json")


def test_lost_ground_is_found_by_ratios_within_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    faster_clock = replace(REPORT, rows=[replace(row, ms=row.ms / 2) for row in REPORT.rows])
    assert slower(faster_clock, REPORT, 0.05) == []
    rows = [REPORT.rows[0], replace(REPORT.rows[1], x_ours=1.13)]
    assert slower(replace(REPORT, rows=rows), REPORT, 0.05) == [
        "64,32,4,128 forward beside torch: x1.130, was x1.200",
        "64,32,4,128 forward beside <peer>: not in this run",
    ]
    REPORT.write(tmp_path / "before.json")
    replace(REPORT, rows=rows).write(tmp_path / "now.json")
    command = ["bench", "--from", str(tmp_path / "now.json"), "--check", str(tmp_path / "before.json")]
    assert main(command) == 1
    assert "2 lost" in capsys.readouterr().out
    assert main([*command[:3], "--check", str(tmp_path / "now.json")]) == 0


def test_the_chart_is_a_picture_of_every_row(tmp_path: Path):
    REPORT.write(tmp_path / "run.json")
    assert main(["bench", "--from", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg")]) == 0
    drawn = ElementTree.fromstring((tmp_path / "run.svg").read_text())
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [str(row) for row in REPORT.rows]
    assert ElementTree.fromstring(chart(replace(REPORT, rows=[]))) is not None


@pytest.mark.parametrize("option", ["--from", "--check"])
def test_a_file_without_figures_is_refused_at_once(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "other.json").write_text("{}")
    for name, why in [("other.json", "is no report"), ("absent.json", "No such file")]:
        with pytest.raises(SystemExit):
            main(["bench", option, str(tmp_path / name)])
        assert why in capsys.readouterr().err


def test_shapes_are_read():
    assert Shape.read("7168,2048,8,32768") == Shape(7168, 2048, 8, 32768)
    assert str(Shape(1, 2, 3, 4)) == "1,2,3,4" and len(PARTS) == 8
    for text in ("1,2,3", "1,2,3,0", "a,b,c,d"):
        with pytest.raises(ValueError):
            Shape.read(text)
