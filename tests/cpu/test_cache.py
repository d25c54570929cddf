"""The cache of exported kernels and the road from options to a function, without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cute_kernels import cache, cache_key, launch, objects, target
from cute_kernels.activation import Activation
from cute_kernels.hopper import configs

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
    """Writes k.so and k.o; the first is to be loaded."""

    def __init__(self, text: str = "object", key: str = "k"):
        self.text, self.key, self.calls = text, key, 0

    def __call__(self, folder: Path) -> list[Path]:
        self.calls += 1
        paths = [folder / f"{self.key}.so", folder / f"{self.key}.o"]
        for path in paths:
            path.write_text(self.text)
        return paths


def test_builds_once_then_reads(tmp_path):
    build = Builder()
    for _ in range(3):
        assert cache.get_or_build(tmp_path / "c", "k", {"module": "m"}, read, build) == "object"
    assert build.calls == 1
    assert cache.find(tmp_path / "c", "k", read) == "object"
    assert not [path for path in (tmp_path / "c").iterdir() if path.name.startswith(".")], "temporary files are left"


@pytest.mark.parametrize(
    "damage",
    ["object cut", "object changed", "second object changed", "record cut", "record not a record", "no object"],
)
def test_damaged_entry_is_rebuilt_with_a_note(tmp_path, caplog, damage):
    build = Builder()
    cache.get_or_build(tmp_path, "k", {}, read, build)
    entry, record = tmp_path / "k.so", tmp_path / "k.json"
    if damage == "object cut":
        entry.write_text("obj")
    elif damage == "object changed":
        entry.write_text("obJect")
    elif damage == "second object changed":
        (tmp_path / "k.o").write_text("obJect")
    elif damage == "record cut":
        record.write_text(record.read_text()[:9])
    elif damage == "record not a record":
        record.write_text("[]")
    else:
        entry.unlink()
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.get_or_build(tmp_path, "k", {}, read, build) == "object"
    assert build.calls == 2
    assert "damaged" in caplog.text and str(record) in caplog.text
    assert cache.get_or_build(tmp_path, "k", {}, read, build) == "object" and build.calls == 2


def test_a_file_that_does_not_load_gives_way_to_the_next(tmp_path, caplog):
    def load(path: Path) -> str:
        if path.suffix == ".so":
            raise OSError("undefined symbol")
        return path.read_text()

    cache.get_or_build(tmp_path, "k", {}, read, Builder("linked in memory"))
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.find(tmp_path, "k", load) == "linked in memory"
    assert "undefined symbol" in caplog.text


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
    builds = Builder(key="a"), Builder(key="b")
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        for build in builds:
            assert cache.get_or_build(tmp_path / "file" / "c", build.key, {}, read, build) == "object"
    assert [build.calls for build in builds] == [1, 1]
    assert caplog.text.count("not usable") == 1


def test_directory_is_private_whatever_the_umask(tmp_path):
    former = os.umask(0)
    try:
        cache.get_or_build(tmp_path / "c", "k", {}, read, Builder())
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    for path in (tmp_path / "c").iterdir():
        assert not path.stat().st_mode & 0o022, f"others may write to {path}"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_directory_that_others_may_write_to_is_refused_by_name(tmp_path, caplog, mode):
    cache.get_or_build(tmp_path / "c", "k", {}, read, Builder("planted"))
    (tmp_path / "c").chmod(mode)
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.get_or_build(tmp_path / "c", "k", {}, read, Builder("ours")) == "ours"
        assert cache.find(tmp_path / "c", "k", read, is_pack=True) is None
    assert f"chmod go-w {tmp_path / 'c'}" in caplog.text
    assert cache.state(tmp_path / "c")["refused"]
    (tmp_path / "c").chmod(0o700)
    assert cache.find(tmp_path / "c", "k", read) == "planted"


def test_file_that_others_may_write_to_is_rebuilt(tmp_path, caplog):
    cache.get_or_build(tmp_path, "k", {}, read, Builder("planted"))
    (tmp_path / "k.o").chmod(0o666)
    with caplog.at_level(logging.WARNING, "cute_kernels"):
        assert cache.get_or_build(tmp_path, "k", {}, read, Builder("ours")) == "ours"
    assert "chmod go-w" in caplog.text


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be somebody else")
def test_directory_of_another_user_is_refused_unless_it_is_a_pack(tmp_path, caplog):
    cache.get_or_build(tmp_path / "c", "k", {}, read, Builder("theirs"))
    for path in (tmp_path / "c", *(tmp_path / "c").iterdir()):
        os.chown(path, 1, 1)
    assert cache.find(tmp_path / "c", "k", read, is_pack=True) == "theirs"
    assert cache.get_or_build(tmp_path / "c", "k", {}, read, Builder("ours")) == "ours"
    assert cache.find(tmp_path / "c", "k", read, is_pack=True) == "theirs"
    assert "belongs to user 1" in caplog.text


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be somebody else")
def test_read_only_directory_is_read_and_noted(caplog):
    """As the user "daemon", who may read root's directory and not write to it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder) / "c"
        cache.get_or_build(place, "k", {}, read, Builder("kept"))
        place.chmod(0o755)
        os.seteuid(1)
        try:
            assert cache.get_or_build(place, "k", {}, read, Builder("again")) == "kept"
            assert cache.get_or_build(place, "other", {}, read, Builder("new", key="other")) == "new"
        finally:
            os.seteuid(0)
        assert not list(place.glob("other*"))
    assert "Permission denied" in caplog.text


def test_entries_used_least_recently_go_first(tmp_path):
    day = 24 * 3600
    for age, key in enumerate("abcd"):
        cache.get_or_build(tmp_path, key, {}, read, Builder("x" * 1000, key))
        os.utime(tmp_path / f"{key}.json", (0, time.time() - (10 - age) * day))
    (tmp_path / ".k.o.1234").write_text("left by a writer that died")
    os.utime(tmp_path / ".k.o.1234", (0, 0))
    assert cache.find(tmp_path, "a", read)  # its use is noted
    left = cache.state(tmp_path)["bytes"] - 1000
    cache.get_or_build(tmp_path, "e", {}, read, Builder("x" * 1000, "e"), most_bytes=left)
    keys = {path.name.partition(".")[0] for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert "a" in keys and "e" in keys and "b" not in keys and keys < set("abcde")
    assert cache.state(tmp_path)["bytes"] <= left


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
        f"    Path({str(tmp_path)!r}, 'built').open('a').write('x'); time.sleep(0.3)\n"
        "    (path / 'k.o').write_text('object'); return [path / 'k.o']\n"
        f"assert cache.get_or_build(Path({str(tmp_path)!r}) / 'c', 'k', {{}}, Path.read_text, build) == 'object'\n"
    )
    root = str(Path(cache.__file__).parents[1])
    ranks = [subprocess.Popen([sys.executable, "-c", program], cwd=root) for _ in range(8)]
    assert [rank.wait(120) for rank in ranks] == [0] * 8
    assert (tmp_path / "built").read_text() == "x"


# The key


def test_key_depends_on_what_decides_the_code_only(tmp_path, device_module):
    versions = {"nvidia-cutlass-dsl": "1", "apache-tvm-ffi": "1"}
    base = cache_key.entry_key(device_module, Options(2), ARCH, versions)
    assert base == cache_key.entry_key(device_module, Options(2), ARCH, dict(versions))
    others = [
        cache_key.entry_key(device_module, Options(3), ARCH, versions),
        cache_key.entry_key(device_module, Options(2), "sm_100a", versions),
        cache_key.entry_key(device_module, Options(2), ARCH, versions | {"apache-tvm-ffi": "2"}),
    ]
    source = tmp_path / "src" / f"{device_module}.py"
    source.write_text(source.read_text() + "\n# another text\n")
    cache_key.source_digest.cache_clear()
    others.append(cache_key.entry_key(device_module, Options(2), ARCH, versions))
    assert len({base, *others}) == 5


def test_key_tells_dtypes_constants_and_versions_apart():
    def key(dtype: str = "bfloat16", offset: float = 1.5, dsl: str = "4.8.1") -> str:
        options = configs.Options(
            "act", dtype, configs.Config(), activation=Activation("clamped_swiglu", 7.0, 1.0, offset)
        )
        return cache_key.entry_key(
            "cute_kernels.hopper.grouped_gemm_kernel", options, ARCH, {"nvidia-cutlass-dsl": dsl}
        )

    assert key() == key()
    assert len({key(), key(dtype="float16"), key(offset=-1.5), key(dsl="4.8.2")}) == 4


def test_key_needs_no_cutlass():
    """Sources are found without importing packages on the way, so a machine without CUTLASS finds the same key."""
    module = "cute_kernels.hopper.grouped_gemm_kernel"
    program = (
        "import sys; sys.modules['cutlass'] = None; from cute_kernels import cache_key\n"
        f"print(cache_key.source_digest({module!r}), *sorted(cache_key.sources_of({module!r})))"
    )
    root = str(Path(cache.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=root, capture_output=True, text=True)
    digest, *names = done.stdout.split()
    assert digest == cache_key.source_digest(module)
    assert "cute_kernels.hopper.epilogues.activation" in names


def test_key_does_not_depend_on_the_path(tmp_path, monkeypatch):
    keys = []
    for place in "ab":
        (tmp_path / place).mkdir()
        (tmp_path / place / "moved_device_module.py").write_text("X = 1\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / place))
            cache_key.source_digest.cache_clear()
            keys.append(cache_key.entry_key("moved_device_module", Options(), ARCH, {}))
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
    assert set(cache_key.sources_of("own_kernels.kernel")) >= {
        "own_kernels.kernel", "own_kernels.parts", "own_kernels.parts.a", "own_kernels.deep", "cute_kernels.cache",
    }  # fmt: skip
    assert "own_kernels.unrelated" not in cache_key.sources_of("own_kernels.kernel")
    assert "json" not in cache_key.sources_of("own_kernels.kernel")
    with pytest.raises(ModuleNotFoundError, match=r"own_kernels\.absent"):
        cache_key.sources_of("own_kernels.absent")


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


def test_pack_is_looked_through_first_and_never_written(tmp_path, device_module, compiler, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(target, "cache_dir", lambda: tmp_path / "pack")
        launch.precompile(device_module, Options(2), ARCH)
    before, made = launch.compile_count(), sorted((tmp_path / "pack").iterdir())
    for by_name in (True, False):
        launch.forget()
        with contextlib.ExitStack() as stack:
            if by_name:
                stack.enter_context(launch.use_kernels(tmp_path / "pack", no_compile=True))
            else:
                patch = stack.enter_context(monkeypatch.context())
                patch.setenv(target.PACKS_VARIABLE, f"{tmp_path / 'absent'}{os.pathsep}{tmp_path / 'pack'}")
            assert callable(launch.kernel(device_module, Options(2), ARCH))
    assert launch.compile_count() == before
    launch.kernel(device_module, Options(3), ARCH)
    assert sorted((tmp_path / "pack").iterdir()) == made
    assert len(entries(tmp_path)) == 1


def test_pack_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(NotADirectoryError, match="absent"):
        launch.use_kernels(tmp_path / "absent")
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        launch.use_kernels(tmp_path)


@pytest.mark.skipif(target.c_linker() is None, reason="no C linker: objects are linked in memory, by CUTLASS")
def test_second_process_compiles_nothing_and_imports_no_cutlass(tmp_path, device_module, compiler):
    launch.precompile(device_module, Options(2), ARCH)
    program = (
        "import sys; sys.modules['cutlass'] = None; from pathlib import Path\n"
        "from cute_kernels import launch, target\n"
        f"target.cache_dir = lambda: Path({str(tmp_path / 'cache')!r})\n"
        f"sys.path[:0] = [{str(tmp_path / 'src')!r}, {str(Path(__file__).parents[2])!r}]\n"
        "from tests.cpu.test_cache import Options\n"
        f"assert callable(launch.kernel({device_module!r}, Options(2), {ARCH!r}))\n"
        "assert launch.compile_count() == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=str(Path(cache.__file__).parents[1]))


def test_without_a_linker_the_object_file_is_loaded(tmp_path, device_module, compiler, monkeypatch):
    monkeypatch.setattr(target, "c_linker", lambda: None)
    assert callable(launch.kernel(device_module, Options(2), ARCH))
    assert entries(tmp_path) and not list((tmp_path / "cache").glob("*.so"))
    assert objects.link(entries(tmp_path)[0], "/bin/false") is None


def test_failure_is_remembered(device_module, compiler):
    before = launch.compile_count()
    for _ in range(2):
        with pytest.raises(launch.CompileError, match="a factor of zero"):
            launch.kernel(device_module, Options(0), ARCH)
    assert launch.compile_count() == before


def test_missing_package_is_named(device_module, monkeypatch):
    monkeypatch.setattr(target, "package_version", lambda name: None)
    with pytest.raises(launch.MissingPackageError, match=r"nvidia-cutlass-dsl, which is not installed.*pip install"):
        launch.kernel(device_module, Options(2), ARCH)


def test_package_that_cannot_be_imported_is_named(device_module, monkeypatch, compiler):
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
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
