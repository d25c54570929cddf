"""The base classes of ops: what an op must provide to run alone, in a `Sequential`, or inside a fused operation.

The protocol is Transformer Engine's `transformer_engine.pytorch.ops` (2.20): a `BasicOperation` gives `op_forward` and
`op_backward` (or, if it takes extra inputs, `fuser_forward` and `fuser_backward`); a `FusedOperation` runs several
basic ops at once through the same `fuser_*` pair. Autograd never records inside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cute_kernels import reference
from cute_kernels.facts import NO_PLANS, Plans
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.random_bits import random_state
from cute_kernels.scheduling import Sharing
from fusible_ops import autocast_mode, casts
from fusible_ops.channels import ChannelEnds
from fusible_ops.delayed_scaling import DelayedScales, loaded_scales, saved_scales
from fusible_ops.graph_key import GraphKey
from fusible_ops.offload import Offloads
from fusible_ops.parameters import NOTHING_HELD, Held, Packing, Unchanged, parameters_of
from fusible_ops.quantizer import Quantizer
from fusible_ops.recipe import DelayedScaling, Recipe
from fusible_ops.shortcut import Shortcut
from patterns.chain import OpSpec

ParamGrads = Sequence[Tensor | None]


class OperationContext:
    """What one basic op keeps between its forward and its backward.

    requires_grad: whether any gradient flows through this op. input_requires_grad: whether its input wants one.
    autocast_dtype: the dtype of an active `torch.autocast`, else None. recipe: the active quantisation recipe, else
    None. owner: how errors call the op.
    split_sizes: those of the grouped linear before this op in the run (for the first ops: after them), if there is one;
    rows past their sum are no tokens. held: the op's parameters as forward finds them. wants: which of them required a
    gradient at forward, in their order; extra_wants: which extra inputs did. unchanged: parameters that backward reads;
    it raises before anything runs if one was changed in place. kernels: where to call kernels, in forward and backward
    (`cute_kernels.ops.entry_points`). formulas: where `reference`'s functions are called (`cute_kernels.ops.formulas`).
    plans: for those calls of this op that are alike whenever this context's attributes and the facts of all inputs and
    parameters of the run are.
    Any further attribute may be attached; tensors go through `save_for_backward`, and backward has `saved_tensors`.
    """

    requires_grad: bool = False
    input_requires_grad: bool = False
    autocast_dtype: torch.dtype | None = None
    recipe: Recipe | None = None
    owner: str = ""
    split_sizes: Tensor | None = None
    held: Held
    wants: tuple[bool, ...] = ()
    extra_wants: tuple[bool, ...] = ()
    unchanged: Unchanged | None = None
    formulas: Any = reference
    kernels: Any = None
    plans: Plans = NO_PLANS
    to_save: tuple[Tensor | None, ...] = ()
    saved_tensors: tuple[Any, ...] = ()

    @classmethod
    def kind(cls, **same: Any) -> type[OperationContext]:
        """A class of contexts that have these attributes; a new context of it costs nothing for them."""
        return type(cls.__name__, (cls,), same)

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nothing called {name!r} was attached to this context in forward")

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward; they come back, in order, as `saved_tensors`."""
        self.to_save = tensors

    def take_saved(self) -> tuple[Any, ...]:
        """`saved_tensors`, which the context keeps no longer: an op that drops one before it ends frees its memory."""
        saved, self.saved_tensors = self.saved_tensors, ()
        return saved

    def compute_dtype(self, default: torch.dtype) -> torch.dtype:
        """The dtype an op computes in: autocast's, else `default`."""
        return self.autocast_dtype or default


class FusibleOperation(Offloads, nn.Module):
    """Anything that may stand in a run of ops: a basic op, or a container of some (`Linear`).

    `name`: how errors and explain() call it; empty means its key in the `Sequential`."""

    name: str = ""
    quantized_program: str = ""  # "package.module:Class" of what runs this unfused under a recipe, if its steps do not

    @property
    def is_fused_op(self) -> bool:
        return False

    @property
    def num_extra_inputs(self) -> int:
        raise NotImplementedError

    def fusible_parts(self) -> list[BasicOperation]:
        """The basic ops this consists of, in order."""
        raise NotImplementedError

    def unfused_steps(self) -> Sequence[BasicOperation | FusedOperation]:
        """What runs this where no rule takes it, one after another."""
        return self.fusible_parts()

    def input_format(self, recipe: Recipe) -> Format | None:
        """The format in which this op quantises its input; None if it does not."""
        return None

    def grad_output_format(self, recipe: Recipe) -> Format | None:
        """The format in which this op quantises the gradient of its output; None if it does not."""
        return None

    def describe(self) -> OpSpec:
        """This op as plain data, for the rules."""
        raise NotImplementedError

    def forward(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        """Run this op alone. `kwargs` reach its (first) basic op."""
        from fusible_ops.fuser import OperationFuser

        own = [kwargs, *[{} for _ in self.fusible_parts()[1:]]] if kwargs else None
        return OperationFuser([self])(input_, *extra_inputs, basic_op_kwargs=own)


class BasicOperation(GraphKey, casts.ParameterOwner, FusibleOperation, ChannelEnds):
    """One op. Class attribute `num_extra_inputs`: how many tensors it takes besides its input.

    `state_dict` has an `_extra_state` entry for every basic op, as Transformer Engine's has: the scales of delayed
    scaling, or an empty tensor while the op has none.

    `fuser_forward` is told in which format its neighbours quantise what it gives them (`next_op_input_quantizer` the
    output, `prev_op_grad_output_quantizer` the gradient of the input; None if they do not). It may then leave that
    unrounded (`fusible_ops.quantizer.unrounded`).
    """

    num_extra_inputs: int = 0
    known_kwargs: tuple[str, ...] | None = None  # names that `op_kwargs` may hold; None: the op checks them itself
    keeps_zero_rows: bool = False  # rows of zeros stay zero, and their gradients reach no parameter
    keeps_rows: bool = True  # its output has the rows of its input
    split_sizes_slot: int | None = None  # which extra input says the rows of each group; None: there are no groups

    packing: Packing | None = None  # of a linear whose rows `pack_glu_weights_` reordered

    def __init__(self) -> None:
        super().__init__()
        self.open_channels()
        self._scales: dict[str, DelayedScales] = {}

    def fusible_parts(self) -> list[BasicOperation]:
        return [self]

    def describe(self) -> OpSpec:
        """An op that no rule knows: kind is the class name in lower case."""
        return OpSpec(type(self).__name__.lower(), self.name)

    def label(self) -> str:
        """How errors call this op where its place in a run is not known."""
        return f"{type(self).__name__} {self.name}".rstrip()

    def hold(self, owner: str) -> Held:
        """The parameters as they are now, asked for every call. owner: how errors call this op."""
        return Held(parameters_of(self)) if self._parameters or self._modules else NOTHING_HELD

    def check_call(self, x: Tensor | None, extra_inputs: Sequence[Tensor], owner: str) -> None:
        """Raise for extra inputs that this op cannot take; called for all ops before any runs.

        x: the input of the run, which has the rows; None after an op that changes them. owner: how the error calls this
        op. It may read facts of tensors (`cute_kernels.facts`), of parameters too: for the same ones it is not asked
        again.
        """

    def check_parameters(self, held: Held, owner: str) -> None:
        """Raise for parameters that this op cannot take. It may read their facts: for the same ones, at the same
        addresses, it may not be asked again.
        """

    def check_wants(self, held: Held, wants: Sequence[bool], owner: str) -> None:
        """Raise for a mix of parameters with and without a gradient that this op cannot take. Asked once for a mix."""

    def check_backward(self, ctx: OperationContext) -> None:
        """Raise for what backward will not find (`main_grad`); called for all ops before any runs backward."""

    def input_width(self) -> int | None:
        """The columns this op asks of its input; None if any number will do."""
        return None

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype that the op computes in without autocast; None: its input's."""
        first = self.first_weight
        return None if first is None else first.dtype

    @property
    def first_weight(self) -> nn.Parameter | None:
        """Of a linear the weight that speaks for all in dtype, device, format and requires_grad."""
        return None

    def output_width(self, incoming: int | None) -> int | None:
        """The columns of its output for `incoming` columns, None where unknown. ValueError for a width it cannot
        take.
        """
        return None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """The output for `input_`. For ops without extra inputs."""
        raise NotImplementedError(f"{type(self).__name__} does not implement op_forward")

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        """(gradient of the input, gradients of the parameters in `parameters()` order)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement op_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        """(output, extra outputs for each basic op). Ops with extra inputs override this and `fuser_backward`."""
        if self.num_extra_inputs:
            raise RuntimeError(f"{type(self).__name__} has extra inputs, so it must override fuser_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]] = ((),),
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        """(gradient of the input, of the parameters for each basic op, of the extra inputs for each basic op)."""
        if self.num_extra_inputs:
            raise RuntimeError(f"{type(self).__name__} has extra inputs, so it must override fuser_backward")
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [list(grad_params)], [()]

    # -- quantisation ----------------------------------------------------------------------------------------------

    def num_quantizers(self, mode: str) -> int:
        """Tensors with a scale of their own under delayed scaling; mode: "forward" or "backward"."""
        return 0

    def quantizer(self, recipe: Recipe, role: str, device: torch.device) -> Quantizer:
        """How an operand with this role is quantised, now. Delayed scales are updated when `autocast` is left; random
        bits are drawn here, from torch's generator of the device.

        RuntimeError for delayed scaling in a forward that backward repeats: the scales have moved on since.
        """
        format = recipe.operand_format(role)
        if not isinstance(recipe, DelayedScaling):
            state = random_state(device) if format.rounding == "stochastic" else None
            return Quantizer(format, state=state)
        mode = "backward" if role == "grad_output" else "forward"
        count = self.num_quantizers(mode)
        scales = self._scales.get(mode)
        if scales is None:
            scales = self._scales[mode] = DelayedScales.fresh(count, recipe.amax_history_len, device)
        scales.use(recipe, format.element, device, autocast_mode.current_group())
        if mode == "backward":
            return Quantizer(format, scales)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{self.label()}: backward repeats a forward under DelayedScaling (activation checkpointing), whose "
                "scales have moved on since; use another recipe there"
            )
        autocast_mode.use_in_forward(scales)
        return self.forward_quantizer(format, role, scales)

    def forward_quantizer(self, format: Format, role: str, scales: DelayedScales) -> Quantizer:
        """How an operand of forward is quantised under delayed scaling; the scales are of input, weight, input, …"""
        return Quantizer(format, scales, first=int(role == "weight"), step=min(self.num_quantizers("forward"), 2))

    def output_dim(self, name: str) -> int:
        """Along which dimension of the parameter `name` the columns of the output lie."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its parameters lie")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packing is not None:
            for name in self._parameters:
                value = destination[prefix + name]
                destination[prefix + name] = self.packing.out_of_memory(value, self.output_dim(name))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.packing is not None:
            for name, p in self._parameters.items():
                value = state_dict.get(prefix + name)
                if p is not None and isinstance(value, Tensor) and value.shape == p.shape:
                    state_dict[prefix + name] = self.packing.into_memory(value, self.output_dim(name))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> Tensor:
        return saved_scales(self._scales)

    def set_extra_state(self, state: Tensor | None) -> None:
        counts = {mode: self.num_quantizers(mode) for mode in ("forward", "backward")}
        for mode, loaded in loaded_scales(state, counts, self.label()).items():
            if mode in self._scales:
                self._scales[mode].take(loaded)  # weights that are held quantised know the object
            else:
                self._scales[mode] = loaded


class FusedOperation(FusibleOperation):
    """Several basic ops run as one. It owns no parameters and no state of a call: plans keep and reuse it."""

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = nn.ModuleList(basic_ops)
        if not len(self.basic_ops):
            raise ValueError("a fused operation needs at least one basic op")

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def num_extra_inputs(self) -> int:
        return sum(op.num_extra_inputs for op in self.fusible_parts())

    def fusible_parts(self) -> list[BasicOperation]:
        return list(self.basic_ops)  # type: ignore[arg-type]

    def check_margin(self, recipe: Recipe, sm_margin: int) -> None:
        """Raise ValueError if its weight gradients under the recipe cannot leave so many SMs free. Asked by forward, if
        they will be wanted, and by `explain`.
        """

    def keeps(self) -> dict[int, int]:
        """Places among what it saves -> the basic op of whose input that is the copy to be kept (`offload_saved`)."""
        return {}

    def shortcut(
        self,
        ctxs: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        sharing: Sharing,
        title: str,
    ) -> Shortcut | None:
        """For calls like this one, of which forward has run: the same route, the same gradients wanted. None if this
        operation has none for them. title: of ranges that profilers show.
        """
        return None

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        """As `BasicOperation.fuser_forward`, for all basic ops at once."""
        raise NotImplementedError(f"{type(self).__name__} does not implement fuser_forward")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        """As `BasicOperation.fuser_backward`, for all basic ops at once."""
        raise NotImplementedError(f"{type(self).__name__} does not implement fuser_backward")
