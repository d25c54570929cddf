"""What becomes of a call when a kernel of a fused step cannot be had: it does not compile, or does not load.

A fused operation asks for its kernels before it changes anything that lasts, so in forward its ops run unfused instead,
with a warning; the run remembers that, and `explain()` shows it as a refusal. A backward must take what the fused
forward has kept, so there each kernel that is missing is replaced by its formula. With on_unfused="error" the error is
raised in both.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cute_kernels.facts import NO_PLANS
from cute_kernels.launch import NoKernelError
from cute_kernels.limits import Refusal
from cute_kernels.ops import formula
from fusible_ops.route import Route, Step
from patterns import Refused

if TYPE_CHECKING:
    from fusible_ops.call import Call
    from fusible_ops.fuser import OperationFuser
    from fusible_ops.op import OperationContext

HELP = "`fusible-ops doctor` checks what compiles and loads kernels"


def refused(step: Step, error: NoKernelError) -> Refused:
    """The step as one that cannot run; `start` and `stop` count basic ops."""
    reason = Refusal(step.rule, "compile", "its kernels", _first_line(error), HELP)
    return Refused(step.rule, step.span.start, step.span.stop, (reason,))


def run_unfused(call: Call, step: Step, error: NoKernelError, recorded: bool) -> Route:
    """Have the call, whose forward has come to `step`, go on without it: the route of its ops unfused, whose
    steps before are those that have run. Raises `error` for on_unfused="error", and for a step that no rule planned.
    """
    fuser, former = call.fuser, call.route
    if not step.rule:
        raise error
    fuser.fail(former, step, error)
    if fuser.on_unfused == "error":
        raise error
    warnings.warn(
        f"{step.name} runs unfused from now on: {_first_line(error)}; {HELP}, and on_unfused='error' raises instead",
        stacklevel=8 if recorded else 7,  # the caller of the module
    )
    for i in range(step.span.start, step.span.stop):
        tried = call.contexts[i]
        ctx = call.contexts[i] = type(tried)()
        ctx.held, ctx.kernels, ctx.plans, ctx.split_sizes = tried.held, tried.kernels, NO_PLANS, tried.split_sizes
    kind = former.device, former.autocast_dtype, former.recipe
    return Route(fuser.steps(*kind), *kind, former.plain, keeps_plans=False)


class KernelsOrFormulas:
    """Functions of `kernels` by name; where a kernel cannot be had its formula computes the same in PyTorch, and
    `failed` is told the error.
    """

    def __init__(self, kernels: Any, failed: Callable[[NoKernelError], None]) -> None:
        self._kernels, self._failed = kernels, failed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except NoKernelError as error:
                self._failed(error)
                kwargs.pop("plans", None)  # for kernels alone
                return formula(name)(*args, **kwargs)

        return call


def spare(fuser: OperationFuser, route: Route, step: Step, contexts: Sequence[OperationContext]) -> None:
    """Have the backward of `step` go on where a kernel cannot be had: its formula runs instead, with a warning, and
    calls after this one run the step's ops unfused. With on_unfused="error" the error is raised.
    """
    if not step.rule:
        return
    known, told = weakref.ref(fuser), False  # what waits for its backward must not keep the run alive

    def failed(error: NoKernelError) -> None:
        nonlocal told
        fuser = known()
        if fuser is None or told:
            return
        told = True
        fuser.fail(route, step, error)
        if fuser.on_unfused == "error":
            raise error
        warnings.warn(
            f"{step.name} backward: {_first_line(error)}; PyTorch computes what this kernel would have, and the next "
            f"calls run unfused; {HELP}, and on_unfused='error' raises instead",
            stacklevel=2,
        )

    kernels = KernelsOrFormulas(contexts[0].kernels, failed)
    for ctx in contexts:
        ctx.kernels = kernels


def _first_line(error: NoKernelError) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
