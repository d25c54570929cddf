"""The cache of exported kernels and the road from options to a function, without a GPU."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_kernels import cache, launch, target

ARCH = "sm_90a"

DEVICE_MODULE = '''
"""out = x * factor, one CTA: the smallest kernel that goes through the whole road."""
from dataclasses import dataclass
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
{extra}

@dataclass(frozen=True)
class Options:
    factor: int = 2

@cute.kernel
def scale(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    if thread < x.shape[0]:
        out[thread] = x[thread] * factor

@cute.jit
def run(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Constexpr, stream):
    scale(x, out, factor).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

def build(options):
    size = cute.sym_int()
    vector = make_fake_compact_tensor(cutlass.Float32, (size,), stride_order=(0,), assumed_align=4)
    if options.factor == 0:
        raise ValueError("a factor of zero")
    return run, (vector, vector, options.factor, make_fake_stream())
'''


@dataclass(frozen=True)
class Options:
    factor: int = 2


@pytest.fixture
def device_module(tmp_path, monkeypatch):
    """A fresh device module, a fresh cache directory, an empty memory; gives the module's name."""
    name = "device_module_" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / f"{name}.py").write_text(DEVICE_MODULE.format(extra=""))
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setattr(target, "cache_dir", lambda: tmp_path / "cache")
    launch.forget()
    yield name
    launch.forget()


@pytest.fixture
def compiler():
    return pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.o"))


# The store alone: objects are plain text here, loading is reading.


def read(path: Path) -> str:
    return path.read_text()


class Builder:
    def __init__(self, text: str = "object"):
        self.text, self.calls = text, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_text(self.text)


def test_builds_once_then_reads(tmp_path):
    build = Builder()
    for _ in range(3):
        assert cache.get_or_build(tmp_path / "c", "k", {"module": "m"}, read, build) == "object"
    assert build.calls == 1
    assert cache.is_stored(tmp_path / "c", "k")
    assert not [path for path in (tmp_path / "c").iterdir() if path.name.startswith(".")], "temporary files are left"


@pytest.mark.parametrize("damage", ["object cut", "object changed", "record cut", "record not a record", "no object"])
def test_damaged_entry_is_rebuilt_with_a_note(tmp_path, caplog, damage):
    build = Builder()
    cache.get_or_build(tmp_path, "k", {}, read, build)
    entry, record = tmp_path / "k.o", tmp_path / "k.json"
    if damage == "object cut":
        entry.write_text("obj")
    elif damage == "object changed":
        entry.write_text("obJect")
    elif damage == "record cut":
        record.write_text(record.read_text()[:9])
    elif damage == "record not a record":
        record.write_text("[]")
    else:
        entry.unlink()
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.get_or_build(tmp_path, "k", {}, read, build) == "object"
    assert build.calls == 2
    assert damage == "no object" or "rebuilt" in caplog.text
    assert cache.get_or_build(tmp_path, "k", {}, read, build) == "object" and build.calls == 2


def test_object_that_does_not_load_is_rebuilt(tmp_path, caplog):
    def load(path: Path) -> str:
        if path.read_text() == "foreign":
            raise RuntimeError("undefined symbol")
        return path.read_text()

    cache.get_or_build(tmp_path, "k", {}, read, Builder("foreign"))
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.get_or_build(tmp_path, "k", {}, load, Builder("native")) == "native"
    assert "undefined symbol" in caplog.text


def test_directory_that_cannot_be_written_is_noted_once(tmp_path, caplog):
    (tmp_path / "file").write_text("not a directory")
    build = Builder()
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        for key in "ab":
            assert cache.get_or_build(tmp_path / "file" / "c", key, {}, read, build) == "object"
    assert build.calls == 2
    assert caplog.text.count("not usable") == 1


def test_a_full_disk_is_survived(tmp_path, caplog, monkeypatch):
    def no_space(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_replace", no_space)
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.get_or_build(tmp_path, "k", {}, read, Builder()) == "object"
    assert "No space left" in caplog.text


def test_ranks_that_start_together_build_once(tmp_path):
    """Eight processes want one entry: one of them builds it."""
    program = (
        "import sys, time; from pathlib import Path; from cute_kernels import cache\n"
        "def build(path):\n"
        f"    Path({str(tmp_path)!r}, 'built').open('a').write('x'); time.sleep(0.3); path.write_text('object')\n"
        f"assert cache.get_or_build(Path({str(tmp_path)!r}) / 'c', 'k', {{}}, Path.read_text, build) == 'object'\n"
    )
    root = str(Path(cache.__file__).parents[1])
    ranks = [subprocess.Popen([sys.executable, "-c", program], cwd=root) for _ in range(8)]
    assert [rank.wait(120) for rank in ranks] == [0] * 8
    assert (tmp_path / "built").read_text() == "x"


# The key


def test_key_depends_on_what_decides_the_code_only(tmp_path, device_module):
    versions = {"nvidia-cutlass-dsl": "1", "apache-tvm-ffi": "1"}
    base = cache.entry_key(device_module, Options(2), ARCH, versions)
    assert base == cache.entry_key(device_module, Options(2), ARCH, dict(versions))
    others = [
        cache.entry_key(device_module, Options(3), ARCH, versions),
        cache.entry_key(device_module, Options(2), "sm_100a", versions),
        cache.entry_key(device_module, Options(2), ARCH, versions | {"apache-tvm-ffi": "2"}),
    ]
    source = tmp_path / "src" / f"{device_module}.py"
    source.write_text(source.read_text() + "\n# another text\n")
    cache.source_digest.cache_clear()
    others.append(cache.entry_key(device_module, Options(2), ARCH, versions))
    assert len({base, *others}) == 5


def test_key_does_not_depend_on_the_path(tmp_path, monkeypatch):
    keys = []
    for place in "ab":
        (tmp_path / place).mkdir()
        (tmp_path / place / "moved_device_module.py").write_text("X = 1\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / place))
            cache.source_digest.cache_clear()
            keys.append(cache.entry_key("moved_device_module", Options(), ARCH, {}))
    assert keys[0] == keys[1]


def test_sources_follow_imports_and_dotted_names(tmp_path, monkeypatch):
    package = tmp_path / "own_kernels"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "parts" / "__init__.py").write_text("")
    (package / "parts" / "a.py").write_text("from ..deep import thing\nimport json\n")
    (package / "deep.py").write_text("thing = 1\n")
    (package / "unrelated.py").write_text("")
    (package / "kernel.py").write_text(
        "def build(o):\n    from own_kernels.parts import a\n\nTABLE = {'x': 'cute_kernels.cache'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(cache.sources_of("own_kernels.kernel")) >= {
        "own_kernels.kernel", "own_kernels.parts", "own_kernels.parts.a", "own_kernels.deep", "cute_kernels.cache",
    }  # fmt: skip
    assert "own_kernels.unrelated" not in cache.sources_of("own_kernels.kernel")
    assert "json" not in cache.sources_of("own_kernels.kernel")
    with pytest.raises(ModuleNotFoundError, match=r"own_kernels\.absent"):
        cache.sources_of("own_kernels.absent")


# The road: options to function


def test_memory_then_disk_then_compiler(tmp_path, device_module, compiler):
    before = launch.compile_count()
    first = launch.kernel(device_module, Options(2), ARCH)
    assert launch.kernel(device_module, Options(2), ARCH) is first
    assert launch.compile_count() == before + 1
    launch.forget()
    with launch.no_compile():
        assert callable(launch.kernel(device_module, Options(2), ARCH))
    assert launch.compile_count() == before + 1
    assert launch.precompile(device_module, Options(3), ARCH) is True
    assert launch.precompile(device_module, Options(3), ARCH) is False
    assert len(entries(tmp_path)) == 2
    record = json.loads(entries(tmp_path)[0].with_suffix(".json").read_text())
    assert record["module"] == device_module and record["arch"] == ARCH
    assert str(tmp_path) not in json.dumps(record)


def test_function_checks_what_it_is_given(device_module, compiler):
    import torch

    function = launch.kernel(device_module, Options(2), ARCH)
    with pytest.raises((TypeError, ValueError), match="x"):
        function(torch.zeros(4, dtype=torch.int64), torch.zeros(4), 0)


def test_object_of_another_key_is_damage(tmp_path, device_module, compiler, caplog):
    launch.precompile(device_module, Options(2), ARCH)
    entries(tmp_path)[0].write_bytes(entries(tmp_path)[0].read_bytes()[:-100])
    launch.forget()
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert callable(launch.kernel(device_module, Options(2), ARCH))
    assert "damaged" in caplog.text


def test_no_compile_names_the_missing_kernel(device_module, compiler):
    named = r"Options\(factor=5\).*cache key [0-9a-f]{64}"
    with launch.no_compile(), pytest.raises(launch.CompileForbiddenError, match=named):
        launch.kernel(device_module, Options(5), ARCH)
    assert callable(launch.kernel(device_module, Options(5), ARCH))


def test_failure_is_remembered(device_module, compiler):
    before = launch.compile_count()
    for _ in range(2):
        with pytest.raises(launch.CompileError, match="a factor of zero"):
            launch.kernel(device_module, Options(0), ARCH)
    assert launch.compile_count() == before


def test_missing_package_is_named(device_module, monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(launch.MissingPackageError, match=r"nvidia-cutlass-dsl.*pip install nvidia-cutlass-dsl"):
        launch.kernel(device_module, Options(2), ARCH)


def test_threads_compile_once(device_module, compiler):
    before, got = launch.compile_count(), []
    threads = [
        threading.Thread(target=lambda: got.append(launch.kernel(device_module, Options(7), ARCH))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launch.compile_count() == before + 1
    assert len(got) == 6 and all(function is got[0] for function in got)


def test_environment_is_left_alone(device_module, compiler):
    import os

    before = dict(os.environ)
    launch.precompile(device_module, Options(9), ARCH)
    assert dict(os.environ) == before


def test_import_needs_no_cutlass():
    program = "import sys; sys.modules['cutlass'] = sys.modules['tvm_ffi'] = None; import cute_kernels.launch"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=str(Path(cache.__file__).parents[1]))
