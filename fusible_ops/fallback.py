"""What becomes of a call when a kernel of a fused step cannot be had: it does not compile, or does not load.

A fused operation asks for its kernels before it changes anything that lasts, so in forward its ops run unfused instead,
with a warning; the run remembers that, and `explain()` shows it as a refusal. In backward it is too late for the call
itself: forward has kept what the fused backward needs. With on_unfused="error" the error is raised in both.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cute_kernels.facts import NO_PLANS
from cute_kernels.launch import NoKernelError
from cute_kernels.limits import Refusal
from fusible_ops.route import Route, Step
from patterns import Refused

if TYPE_CHECKING:
    from fusible_ops.call import Call
    from fusible_ops.fuser import OperationFuser

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


def give_up(fuser: OperationFuser, route: Route, step: Step, error: NoKernelError) -> NoReturn:
    """Raise what has stopped the backward of `step`; calls after this one run its ops unfused."""
    if not step.rule:
        raise error
    fuser.fail(route, step, error)
    if fuser.on_unfused == "error":
        raise error
    raise NoKernelError(
        f"{step.name} backward: {_first_line(error)}; its forward has run fused already, so gradients of this call are "
        f"lost. From the next call on these ops run unfused; {HELP}"
    ) from error


def giving_up(fuser: OperationFuser, route: Route, step: Step) -> Callable[[NoKernelError], NoReturn]:
    """`give_up`, for what the run itself holds and must not keep it alive."""
    known = weakref.ref(fuser)

    def lost(error: NoKernelError) -> NoReturn:
        fuser = known()
        if fuser is None:
            raise error
        give_up(fuser, route, step, error)

    return lost


def _first_line(error: NoKernelError) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
