"""Which kernels a program needs, found without a GPU: on meta tensors everything but the kernels runs as it would.

    with rehearsal("sm_90a") as specs:
        ...                        # forward and backward of modules on the meta device

Inside, the meta device is planned for as an ideal machine of that architecture, host functions check, choose and
allocate as ever, and instead of being compiled and launched a kernel is listed: (device module, options, architecture),
what `launch.precompile` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cute_kernels import launch, ops, target
from cute_kernels.hopper import operands
from cute_kernels.registry import host_functions_for


class _Wanted(dict[launch.Spec, launch.Function]):
    """Stands for the kernels in memory: has every one, and lists which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[launch.Spec, None] = {}

    def get(self, spec: launch.Spec, default: Any = None) -> launch.Function:
        self.specs[spec] = None
        return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    """Every kernel in a rehearsal."""


@contextmanager
def rehearsal(arch: str) -> Iterator[dict[launch.Spec, None]]:
    """Gives the kernels asked for inside it, in the order of first use. One at a time; ValueError for an unknown arch.

    Objects that plan on the meta device (a `Sequential`, say) are of no further use there, since they keep plans.
    """
    machine, probe, wanted = target.Target.named(arch), target._probe, _Wanted()

    def rehearsed(device_type: str, index: int | None) -> target.Target:
        return machine if device_type == "meta" else probe(device_type, index)

    with ExitStack() as stack:
        for owner, name, value in (
            (launch, "_functions", wanted),
            (launch, "current_stream", lambda device: 0),
            (target, "_probe", rehearsed),
            (operands, "_multiprocessors", {}),
            (ops, "_HOSTS", {**ops._HOSTS, "meta": lambda device: host_functions_for(arch)}),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield wanted.specs
