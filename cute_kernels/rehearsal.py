"""Which kernels a program needs, found without a GPU: on meta tensors everything but the kernels runs as it would.

    with rehearsal("sm_90a") as specs:
        ...                        # forward and backward of modules on the meta device

Inside, the meta device is planned for as an ideal machine of that architecture, host functions check, choose and
allocate as ever, and instead of being compiled and launched a kernel is listed: (device module, options, architecture),
what `launch.precompile` takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cute_kernels import launch, ops, target
from cute_kernels.hopper import operands
from cute_kernels.registry import host_functions_for


class _Wanted(dict[launch.Spec, launch.Function]):
    """Stands for the kernels in memory: to this thread has every one, and lists which were asked for; to others it is
    `real`, so that what they launch is launched.
    """

    def __init__(self, real: dict[launch.Spec, launch.Function]) -> None:
        super().__init__()
        self.real, self.thread = real, threading.get_ident()
        self.specs: dict[launch.Spec, None] = {}

    def get(self, spec: launch.Spec, default: Any = None) -> Any:
        if threading.get_ident() != self.thread:
            return self.real.get(spec, default)
        self.specs[spec] = None
        return _do_nothing

    def __contains__(self, spec: object) -> bool:
        return spec in self.real

    def __getitem__(self, spec: launch.Spec) -> launch.Function:
        return self.real[spec]

    def __setitem__(self, spec: launch.Spec, function: launch.Function) -> None:
        self.real[spec] = function


def _do_nothing(*arguments: Any) -> None:
    """Every kernel in a rehearsal."""


@contextmanager
def rehearsal(arch: str) -> Iterator[dict[launch.Spec, None]]:
    """Gives the kernels asked for inside it, in the order of first use. One at a time; other threads notice nothing.
    ValueError for an unknown arch.

    Objects that plan on the meta device (a `Sequential`, say) are of no further use there, since they keep plans.
    """
    machine, probe, stream = target.Target.named(arch), target._probe, launch.current_stream
    wanted = _Wanted(launch._functions)

    def rehearsed(device_type: str, index: int | None) -> target.Target:
        return machine if device_type == "meta" else probe(device_type, index)

    with ExitStack() as stack:
        for owner, name, value in (
            (launch, "_functions", wanted),
            (launch, "current_stream", lambda device: 0 if device.type == "meta" else stream(device)),
            (target, "_probe", rehearsed),
            (operands, "_multiprocessors", {}),
            (ops, "_HOSTS", {**ops._HOSTS, "meta": lambda device: host_functions_for(arch)}),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield wanted.specs
