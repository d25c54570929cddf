"""Our kernels in Transformer Engine's own models: one line, and an unchanged `te.ops.Sequential` runs them.

    import fusible_ops.integrations.transformer_engine as te_plugin
    te_plugin.install()                    # before the first forward of the model
    print(te_plugin.explain(model))

Parameters, checkpoints, `main_grad`, delayed weight gradients, CPU offload and activation checkpointing work as before.
Chains are taken that a rule fuses here and that hold a grouped linear or an activation between two linears;
a call that is not as a fused chain needs it (another dtype, buffers of the caller's, quantised parameters) runs
Transformer Engine's own ops.
Source: the contract of `transformer_engine.pytorch.ops.register_forward_backward_fusion` (2.20).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels.target import Target
from fusible_ops.fuser import OperationFuser
from fusible_ops.integrations import te_fused, te_whole
from fusible_ops.integrations.te_parts import Run, runs_of
from fusible_ops.recipe import Float8BlockScaling, Format, Recipe
from patterns import explain as told

__all__ = ["explain", "install", "uninstall"]


def install() -> None:
    """Let Transformer Engine's fuser ask us first, in all models of this process. Again: no change.

    It keeps plans, so a model that has run keeps those that it has made; install before its first forward.
    ImportError, with words, if Transformer Engine is not installed or has no such fuser.
    """
    fuser, version = _fuser()
    registered = fuser.forward_backward_fusion_functions
    if fuse not in registered:
        registered.insert(0, fuse)
    te_whole.replace(fuser, version)
    te_fused.Joint.is_installed = True


def uninstall() -> None:
    """Give it back. Plans that hold our operations run Transformer Engine's ops from then on."""
    fuser, _ = _fuser()
    if fuse in fuser.forward_backward_fusion_functions:
        fuser.forward_backward_fusion_functions.remove(fuse)
    te_whole.put_back(fuser)
    te_fused.Joint.is_installed = False


def _fuser() -> tuple[Any, str]:
    """Transformer Engine's class of fusers, which keeps the functions of `register_forward_backward_fusion`, and its
    version.
    """
    try:
        import transformer_engine
        from transformer_engine.pytorch.ops.fuser import OperationFuser as Theirs

        Theirs.forward_backward_fusion_functions  # noqa: B018
        return Theirs, transformer_engine.__version__
    except (ImportError, AttributeError) as missing:
        raise ImportError(
            "fusible_ops.integrations.transformer_engine needs transformer-engine[pytorch] 2.20 or a later one whose "
            f"operation fuser takes fusions: {missing}"
        ) from missing


def fuse(ops: Sequence[Any], *, recipe: Any = None, **_: Any) -> list[Any]:
    """The fusion function: ops of a run in, the same with our operations in the place of those that a rule takes."""
    ours = _recipe(recipe)
    if isinstance(ours, str):
        return list(ops)
    fused, at = [], 0
    for part in _taken(ops, ours):
        fused += [*ops[at : part.start], te_fused.FusibleOpsRun(part.ops, ours)]
        at = part.start + len(part.ops)
    return [*fused, *ops[at:]]


def _taken(ops: Sequence[Any], recipe: Recipe | None) -> Iterator[Run]:
    for run in runs_of(ops)[0]:
        device = next((p.device for op in run.ops for p in op.parameters()), None)
        if device is None:
            continue
        made = OperationFuser(run.ours, run.names).plan(Target.of(device), None, recipe)
        for step in made.steps:
            kinds = [op.kind for op in made.chain.ops[step.start : step.stop]]
            if step.rule is not None and ("grouped_linear" in kinds or len(kinds) > 1):
                yield run.part(step.start, step.stop)


def _recipe(recipe: Any) -> Recipe | str | None:
    """Our recipe for one of Transformer Engine's, None for none; or why there is none."""
    if recipe is None:
        return None
    if type(recipe).__name__ != "Float8BlockScaling":
        return f"{type(recipe).__name__} runs on Transformer Engine's own ops"
    names = ("use_f32_scales", "x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
    fields = {name: getattr(recipe, name) for name in (*names, "backward_override")}
    return Float8BlockScaling(fp8_format=Format[recipe.fp8_format.name], **fields)


def explain(model: Any, target: str | Target | torch.device | None = None, recipe: Any = None) -> str:
    """Which kernel runs what in a `te.ops.Sequential`, where none does why, and which ops Transformer Engine keeps.

    target: as `fusible_ops.Sequential.explain`; None: the parameters' device. recipe: one of Transformer Engine's.
    """
    ours = _recipe(recipe)
    if isinstance(ours, str):
        return ours
    texts = []
    for ops in _runs_of_their_fuser(model):
        runs, unlike = runs_of(ops)
        for i, why in unlike.items():
            texts.append(f"{type(ops[i]).__name__} [{i}]: Transformer Engine's own; {why.reason}")
        for run in runs:
            device = next((p.device for op in run.ops for p in op.parameters()), torch.device("cpu"))
            where = Target.named(target) if isinstance(target, str) else target
            machine = where if isinstance(where, Target) else Target.of(where or device)
            texts.append(told(OperationFuser(run.ours, run.names).plan(machine, None, ours)))
    return "\n\n".join(texts)


def _runs_of_their_fuser(model: Any) -> Iterator[list[Any]]:
    """The basic ops of each run, as Transformer Engine's Sequential puts them together."""
    run: list[Any] = []
    for module in [*model, None]:
        if hasattr(module, "is_fused_op"):
            run += list(module.basic_ops) if module.is_fused_op else [module]
        elif run:
            yield run
            run = []
