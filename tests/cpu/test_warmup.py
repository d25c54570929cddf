"""Which kernels a model needs, found without a GPU; packs of them; and how the command names models."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import fusible_ops as ops
from cute_kernels import launch, target
from cute_kernels.hopper.configs import Options
from cute_kernels.hopper.grouped_wgrad import WgradOptions
from cute_kernels.hopper.rowwise import GroupOffsetsOptions
from cute_kernels.rehearsal import rehearsal
from cute_kernels.target import Target
from fusible_ops import warmup
from fusible_ops.cli import COMMANDS, main
from fusible_ops.cli.models import load, mlp
from fusible_ops.meta_run import Use
from fusible_ops.warmup import compile_pack, compiled_at_first_call, kernels_of

ARCH = "sm_90a"


def kinds(specs: list[launch.Spec]) -> dict[str, int]:
    """How many kernels of each kind."""
    found: dict[str, int] = {}
    for module, options, _ in specs:
        kind = getattr(options, "kind", module.rpartition(".")[2])
        found[kind] = found.get(kind, 0) + 1
    return found


def test_every_kernel_of_a_step_is_found_for_any_row_count():
    specs = kernels_of(mlp(128, 256, 8), use=Use(inference=False))
    assert len(specs) == len(set(specs))
    assert set(kinds(specs)) == {"act", "store", "dact", "rowwise_kernel", "grouped_wgrad_kernel"}
    tiles = {(o.config.tile_m, o.config.tile_n) for _, o, _ in specs if isinstance(o, Options) and o.kind == "act"}
    assert len(tiles) > 1, "few rows and many take different tiles"
    assert {o.factor for _, o, _ in specs if isinstance(o, Options) and o.kind == "dact"} == {"float32"}


@pytest.mark.parametrize("recipe", [None, ops.Float8BlockScaling()], ids=["plain", "blocks"])
@pytest.mark.parametrize("sizes", [(256, 128, 1), (2048, 768, 96)], ids=str)
def test_no_row_count_needs_another_kernel(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], recipe: object):
    """What is found at the row counts of `ROWS` is all there is, wherever between them or beyond a batch lies."""
    model, use = mlp(*sizes), Use(recipe=recipe)
    found = set(kernels_of(model, use=use))
    generator = torch.Generator().manual_seed(0)
    others = torch.cat([torch.randint(1, 2 ** (i + 8), (12,), generator=generator) for i in range(10)])
    monkeypatch.setattr(warmup, "ROWS", tuple(others.tolist()))
    assert set(kernels_of(model, use=use)) <= found and len(found) > 8


def test_how_the_model_is_used_decides():
    model = mlp(128, 256, 8)
    assert set(kinds(kernels_of(model, use=Use(training=False)))) == {"act", "store", "rowwise_kernel"}
    halves = kernels_of(model, use=Use(probs=torch.bfloat16, splits=torch.int32))
    assert {o.factor for _, o, _ in halves if isinstance(o, Options) and o.kind == "act"} == {"bfloat16"}
    assert {o.index for _, o, _ in halves if isinstance(o, GroupOffsetsOptions)} == {"int32"}
    assert kernels_of(mlp(128, 256, 8, dtype="float32")) == []
    cast = kernels_of(mlp(128, 256, 8, dtype="float32"), use=Use(autocast=torch.bfloat16))
    assert {o.out for _, o, _ in cast if isinstance(o, WgradOptions)} == {"float32"}


@pytest.mark.parametrize("arguments", [{}, {"single_grouped_weight": True}, {"bias": True}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_as_they_lie(arguments: dict[str, bool], device: str):
    """Packed weights are one operand on the meta device too, and the model itself stays where and as it was."""
    model = mlp(64, 64, 4, linear=arguments, device=device)
    before = {name: (p.data_ptr(), p.device) for name, p in model.named_parameters()}
    specs = kernels_of(model)
    assert not any(o.separate for _, o, _ in specs if isinstance(o, Options | WgradOptions))
    assert {name: (p.data_ptr(), p.device) for name, p in model.named_parameters()} == before


def test_main_grads_are_added_to():
    specs = kernels_of(mlp(64, 64, 4, linear={"accumulate_into_main_grad": True}))
    assert {o.accumulate for _, o, _ in specs if isinstance(o, WgradOptions)} == {True}


def test_every_sequential_of_a_model_counts_and_others_do_not():
    dense = ops.Sequential(ops.SwiGLU(), ops.Linear(64, 96, dtype=torch.bfloat16), nn.LayerNorm(96))
    model = nn.ModuleDict({"moe": mlp(64, 64, 4), "head": nn.Linear(8, 8), "dense": dense})
    alone = kernels_of(model["moe"])
    both = kernels_of(model)
    assert both[: len(alone)] == alone and len(both) > len(alone)
    assert kernels_of(nn.Linear(8, 8)) == []


@pytest.mark.parametrize("recipe", [None, ops.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
def test_what_cudnn_frontend_compiles_is_named_and_left_to_the_first_call(recipe: ops.Recipe | None):
    """All of it and nothing else, step by step; on Hopper there is nothing of the kind."""
    packed = mlp(128, 256, 8, act={"glu_interleave_size": 32})
    assert kernels_of(packed, "sm_100a", Use(recipe=recipe)) == []
    ((title, kernels),) = compiled_at_first_call(packed, "sm_100a", Use(recipe=recipe))
    assert title == "GroupedLinear [0], ScaledSwiGLU [1], GroupedLinear [2]"
    names = [bound.kernel.name.removesuffix("_mxfp8") for bound in kernels]
    product = "cudnn_gemm" if recipe is None else "cudnn_quant"
    assert names == ["cudnn_glu", product, "cudnn_dglu", product, "cudnn_wgrad", "cudnn_wgrad"]
    alone = compiled_at_first_call(mlp(128, 256, 8), "sm_100a", Use(recipe=recipe))
    assert [title for title, _ in alone] == ["GroupedLinear [0]", "GroupedLinear [2]"]
    assert compiled_at_first_call(packed, "sm_90a") == [] == compiled_at_first_call(packed, "sm_120a")


def test_a_rehearsal_leaves_nothing_behind():
    former = launch._functions, launch.current_stream, target._probe
    with pytest.raises(KeyError), rehearsal(ARCH) as specs:
        assert Target.of("meta") == Target.named(ARCH) and Target.of("cpu").arch == "cpu"
        raise KeyError
    assert specs == {} and (launch._functions, launch.current_stream, target._probe) == former
    assert Target.of("meta").arch == "meta"
    with pytest.raises(ValueError, match="sm_90a"), rehearsal("sm_90"):
        pass


def test_other_threads_launch_as_ever(monkeypatch: pytest.MonkeyPatch):
    """What they have in memory is called, what they add stays; the thread that rehearses gets what does nothing."""
    known, added = ("module", "known", ARCH), ("module", "added", ARCH)
    called: list[int] = []
    real = {known: called.append}
    monkeypatch.setattr(launch, "_functions", real)
    monkeypatch.setattr(launch, "_obtain", lambda spec: called.append)

    def other() -> None:
        launch.kernel(*known)(1)
        launch.kernel(*added)(2)

    with rehearsal(ARCH) as specs:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        launch.kernel(*known)(3)
    assert called == [1, 2] and list(specs) == [known]
    assert launch._functions is real and set(real) == {known, added}


def test_pack_is_compiled_in_other_processes_once(tmp_path: Path):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")
    specs = [spec for spec in kernels_of(mlp(64, 64, 4)) if isinstance(spec[1], GroupOffsetsOptions)][:1]
    told = []
    made = compile_pack(specs, tmp_path / "pack", report=told.append)
    assert [kernel.new for kernel in made] == [True] and told == made
    assert (tmp_path / "pack").stat().st_mode & 0o077 == 0o055, "another user may read it"
    launch.forget()
    assert launch.precompile(*specs[0], pack=tmp_path / "pack") is False
    launch.forget()
    with launch.use_kernels(tmp_path / "pack", no_compile=True):
        assert callable(launch.kernel(*specs[0]))
    launch.forget()


# The command


def test_models_by_shape_file_and_name(tmp_path: Path):
    assert [type(op).__name__ for op in load("64,32,4")] == ["GroupedLinear", "ScaledSwiGLU", "GroupedLinear"]
    assert [type(op).__name__ for op in load("64,32,0")] == ["Linear", "SwiGLU", "Linear"]
    layer = {"hidden": 64, "intermediate": 32, "experts": 2, "activation": "ScaledSReLU", "linear": {"bias": True}}
    (tmp_path / "model.json").write_text(json.dumps([layer, layer]))
    described = load(str(tmp_path / "model.json"))
    assert len(described) == 2 and described[0][0].out_features == 32 and described[0][0].has_bias
    text = (
        "import fusible_ops as fo\ndef make(device=None):\n    return fo.Sequential(fo.Linear(8, 8, device=device))\n"
    )
    (tmp_path / "own.py").write_text(text)
    assert next(load(f"{tmp_path / 'own.py'}:make").parameters()).is_meta
    assert isinstance(load("torch.nn:Identity"), nn.Identity)


@pytest.mark.parametrize(
    ("text", "says"),
    [("64,32", "needs three"), ("nothing", "is no model"), ("absent.py:x", "absent.py"), ("math:sqrt", "argument")],
)
def test_what_is_no_model_is_refused(text: str, says: str):
    with pytest.raises((ValueError, TypeError), match=says):
        load(text)


def test_the_command_lists_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["warmup", "64,32,4", "--out", str(tmp_path / "pack"), "--inference", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(kernels_of(mlp(64, 32, 4), use=Use(training=False)))
    assert not (tmp_path / "pack").exists()
    assert main(["warmup", "64,32,4", "--inference", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == listed
    assert main(["warmup", "64,32,4", "--out", str(tmp_path), "--arch", "sm_80"]) == 1
    assert "nothing is fused" in capsys.readouterr().out


def test_a_model_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Found whichever way the command was started; what is no model is said in words; folders of pages are made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "model_of_mine.py").write_text(
        "import fusible_ops as fo\ndef make(device=None):\n    return fo.Sequential(fo.Linear(8, 8, device=device))\n"
    )
    assert main(["explain", "model_of_mine:make", "--html", "out/page.html"]) == 0
    assert (tmp_path / "out" / "page.html").read_text().startswith("<!doctype html>")
    assert main(["explain", "nothing"]) == 2
    assert "'nothing' is no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model",
    ["64,32", "64,,32", "0,0,0", "absent.json", "absent:name", "absent.py:name", "fusible_ops:absent"]
    + ["fusible_ops:Linear", "fusible_ops.cli.models:HELP", "collections:OrderedDict", "torch.nn:Identity"],
)
def test_what_is_no_model_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str], model: str):
    assert main(["explain", model]) == 2
    assert capsys.readouterr().err.startswith("fusible-ops: ")


@pytest.mark.parametrize("text", ["{", "5", '{"hidden": 64}', '{"hidden": 64, "intermediate": 32, "expert": 1}'])
def test_what_is_no_description_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str):
    (tmp_path / "model.json").write_text(text)
    assert main(["warmup", str(tmp_path / "model.json"), "--list"]) == 2
    assert "model.json" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["-5", "0", "many"])
def test_row_counts_that_cannot_be(rows: str):
    with pytest.raises(SystemExit):
        main(["explain", "64,32,4", "--rows", rows])


def test_the_command_is_told_where_the_pack_goes(capsys: pytest.CaptureFixture[str]):
    assert main(["warmup", "64,32,4"]) == 2
    said = capsys.readouterr()
    assert "--out DIR" in said.err and "--list" in said.err and not said.out


def test_on_blackwell_the_command_says_what_no_pack_can_hold(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for more in (["--list"], ["--out", str(tmp_path / "pack")]):
        assert main(["warmup", "64,32,4", "--arch", "sm_100a", *more]) == 0
        said = capsys.readouterr().out
        assert said.startswith(
            "cuDNN Frontend cannot save kernels, so every process compiles these at their first call"
        )
        assert "\n  GroupedLinear [0]\n    cudnn_gemm  fc forward\n" in said
    assert not (tmp_path / "pack").exists()
    assert main(["warmup", "64,32,4", "--arch", "sm_120a", "--list"]) == 1
    assert "needs no kernels on sm_120a: nothing is fused there" in capsys.readouterr().out


def test_python_m_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["fusible_ops", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fusible_ops", run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS) and "doctor" in COMMANDS
