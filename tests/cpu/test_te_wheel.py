"""Which Transformer Engine the tests get: the whole package is not taken for its Python alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import te_wheel


@pytest.mark.parametrize("place", ["wheel_lib", ".", ".."])
def test_the_extension_is_found_where_wheels_and_builds_put_it(tmp_path: Path, place: str) -> None:
    package = tmp_path / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (package / "wheel_lib" / "libtransformer_engine.so").touch()
    assert not te_wheel._has_compiled(package)
    (package / place / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert te_wheel._has_compiled(package)
