"""cuDNN Frontend's operation classes as their documentation and sources describe them, in PyTorch, on the CPU.

A double for tests of the adapters: what is called even and odd, alpha and alpha squared, what prob multiplies, where
scales lie. It shares no formula with the adapters; quantised results are made by `cute_kernels.quantization`. Whether
the real kernels compute this, only a Blackwell can show (tests/gpu).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.quantization.formats import mxfp8
from cute_kernels.quantization.quantize import quantize
from cute_kernels.quantization.scale_layout import swizzle_128x4

MARGIN = "CUDNNFE_CLUSTER_OVERLAP_MARGIN"
BLOCK = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def get_grouped_gemm_wgrad_workspace_size_sm100(experts: int) -> int:
    return 512 * experts


class Operation:
    """What the classes have in common. `made` are those that exist, in order; `calls` counts executions."""

    made: ClassVar[list[Operation]] = []

    def __init__(self, **arguments: Any) -> None:
        self.samples = {n.removeprefix("sample_"): v for n, v in arguments.items() if n.startswith("sample_")}
        self.settings = {n: v for n, v in arguments.items() if not n.startswith("sample_")}
        self.margin, self.checked, self.compiled, self.calls = os.environ.get(MARGIN), False, False, 0
        self.made.append(self)

    def check_support(self) -> bool:
        self.checked = True
        return True

    def compile(self) -> None:
        assert self.checked and os.environ.get(MARGIN) == self.margin
        self.compiled = True

    def execute(self, **arguments: Any) -> None:
        assert self.compiled
        self.calls += 1
        given = {name.removesuffix("_tensor"): value for name, value in arguments.items()}
        for name, sample in self.samples.items():
            assert (sample is None) == (given.get(name) is None), name
        for name, value in given.items():
            if isinstance(value, Tensor):
                assert value.data_ptr() % 16 == 0, name
        self.compute(SimpleNamespace(**given))

    def compute(self, given: Any) -> None:
        raise NotImplementedError

    def a(self, given: Any) -> Tensor:
        """The rows in FP32."""
        if getattr(given, "sfa", None) is None:
            return given.a.float()
        found = values(given.a)
        return found * scales(given.sfa, *found.shape, self.settings["sf_vec_size"])

    def b(self, given: Any) -> Tensor:
        """The weight as [E, n, k] in FP32."""
        data = values(given.b)
        data = data.mT if self.settings.get("b_major") == "n" else data
        if getattr(given, "sfb", None) is None:
            return data
        block, parts = self.settings["sf_vec_size"], given.sfb.reshape(data.shape[0], -1)
        return torch.stack([w * scales(s, *w.shape, block) for w, s in zip(data, parts, strict=True)])

    def products(self, given: Any) -> tuple[Tensor, Tensor]:
        """(acc [M, n], the group of each row); rows past the last end are NaN."""
        a, b, ends = self.a(given), self.b(given), given.padded_offsets.tolist()
        assert all(end % 256 == 0 for end in ends) and ends == sorted(ends)
        acc, group = torch.full((a.shape[0], b.shape[1]), float("nan")), torch.zeros(a.shape[0], dtype=torch.int64)
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            acc[start:end] = a[start:end] @ b[g].T
            group[start:end] = g
        return acc, group

    def give(self, given: Any, name: str, result: Tensor) -> None:
        """A result as it is, or quantised both ways with its scales."""
        out = getattr(given, name)
        if out.dtype.itemsize > 1:
            out.copy_(result)
            if given.amax is not None:
                ends = given.padded_offsets.tolist()
                parts = (result,) if given.amax.shape[1] == 1 else halves(result)  # of dGLU one of each half
                for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    for i, part in enumerate(parts):
                        given.amax[g, i] = part[start:end].abs().amax() if end > start else float("-inf")
            return
        assert self.settings["discrete_col_sfd"] and float(given.norm_const) == 1.0
        data, scale, _ = quantize(result, mxfp8())
        out.copy_(data)
        _fill(given.sfd_row, [swizzle_128x4(scale)])
        _give_columns(given.d_col, given.sfd_col, result, given.padded_offsets.tolist())


def values(data: Tensor) -> Tensor:
    """FP32 of BF16, FP8, or two E2M1 values a byte, the even one in the low half."""
    if data.dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
        return data.float()
    codes = data.view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3)).float()


def scales(stored: Tensor, rows: int, columns: int, block: int) -> Tensor:
    """FP32 [rows, columns], of tiles of 128 rows x 4 blocks: scale (i, j) of one is byte 16(i%32) + 4(i//32) + j."""
    blocks = -(-columns // block)
    high, wide = -(-rows // 128), -(-blocks // 4)
    tiles = stored.reshape(-1).view(torch.uint8).reshape(high, wide, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)[:rows, :blocks].contiguous()
    if stored.dtype == torch.float8_e8m0fnu:
        decoded = torch.exp2(plain.float() - 127)
    else:
        decoded = plain.view(stored.dtype).float()
    return decoded.repeat_interleave(block, 1)[:, :columns]


def _give_columns(out: Tensor, scale_out: Tensor, result: Tensor, ends: list[int]) -> None:
    """A result quantised along its rows, the tiles of scales of each group together."""
    tiles = []
    for start, end in zip([0, *ends], ends, strict=False):
        if end > start:
            data, scale, _ = quantize(result[start:end], mxfp8(), columnwise=True)
            out[start:end].copy_(data)
            tiles.append(swizzle_128x4(scale.mT.contiguous()))
    _fill(scale_out, tiles)


def _fill(place: Tensor, parts: list[Tensor]) -> None:
    flat = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
    assert flat.numel() == place.numel()
    place.view(torch.uint8).copy_(flat.view(place.shape))


def flat(name: str, value: Any) -> Any:
    """A matrix [M, X, 1] as [M, X], weights [n, K, E] as [E, n, K], tiles (32, 4, M', 4, K', L) as they lie."""
    if not isinstance(value, Tensor) or value.dim() not in (3, 6) or name in ("dprob", "dprob_workspace", "amax"):
        return value
    if value.dim() == 6:
        return value.permute(5, 2, 4, 0, 1, 3)
    return value.permute(2, 0, 1) if name == "b" else value.view(-1) if name == "prob" else value.squeeze(2)


def halves(t: Tensor) -> tuple[Tensor, Tensor]:
    """(even blocks of 32 columns: gate, odd blocks: up)."""
    blocks = t.view(t.shape[0], -1, 2, BLOCK)
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def woven(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate.unflatten(1, (-1, BLOCK)), up.unflatten(1, (-1, BLOCK))], 2).flatten(1)


def glu_value(gate: Tensor, up: Tensor, act: str, offset: float, alpha: float, high: float, low: float) -> Tensor:
    if act == "geglu":
        gate, up = gate.clamp(max=high), up.clamp(low, high) + offset
        return up * gate * torch.sigmoid(alpha * gate)
    return up * gate * torch.sigmoid(gate)


class GroupedGemmSm100(Operation):
    def compute(self, given: Any) -> None:
        acc, group = self.products(given)
        acc, prob = acc * given.alpha[group, None], given.prob[:, None]
        given.d.copy_(acc * prob if given.bias is None else acc + given.bias.T[group].float() * prob)


class GroupedGemmQuantSm100(Operation):
    def compute(self, given: Any) -> None:
        acc, group = self.products(given)
        acc = acc * given.alpha[group, None]
        prob = 1.0 if given.prob is None else given.prob[:, None]
        self.give(given, "d", acc * prob if given.bias is None else acc + given.bias.T[group].float() * prob)


class GroupedGemmGluSm100(Operation):
    def compute(self, given: Any) -> None:
        acc, group = self.products(given)
        acc = acc * given.alpha[group, None]
        if given.bias is not None:
            acc = acc + given.bias.T[group].float()
        given.c.copy_(acc)
        clamp = [getattr(given, name, value) for name, value in (("geglu_alpha", 1.702), ("glu_clamp_max", 7.0))]
        assert given.sfa is not None or clamp == [1.702, 7.0]  # BF16 forbids others
        value = glu_value(*halves(acc), self.settings["act_func"], given.linear_offset, *clamp, -clamp[1])
        self.give(given, "d", value * given.prob[:, None])


class GroupedGemmGluHadamardSm100(Operation):
    def compute(self, given: Any) -> None:
        acc, group = self.products(given)
        acc = acc * given.alpha[group, None]
        if given.bias is not None:
            acc = acc + given.bias.T[group].float()
        given.c.copy_(acc)
        value = glu_value(*halves(acc), self.settings["act_func"], 1.0, 1.702, 7.0, -7.0) * given.prob[:, None]
        act = value.bfloat16()
        given.d.copy_(act)
        assert self.settings["use_tmem_post_rht_amax"]  # else they rotate without signs
        turned = act.float().T.reshape(act.shape[1], -1, 16) @ given.hadamard.float().T
        turned = turned.reshape(act.shape[1], -1).abs() * 0.25  # whatever matrix they are given
        ends = given.padded_offsets.tolist()
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                given.amax[g], given.post_rht_amax[g] = value[start:end].abs().max(), turned[:, start:end].max()


class GroupedGemmDgluSm100(Operation):
    def scratch_workspace_bytes(self) -> int:
        return 128

    def compute(self, given: Any) -> None:
        assert given.workspace.numel() >= 128 and not given.dprob.any()
        acc, group = self.products(given)
        grad = acc * given.alpha[group, None] ** 2
        with torch.enable_grad():
            gate, up = (t.float().requires_grad_() for t in halves(given.c.float() * given.beta[group, None]))
            s = self.settings
            constants = (s.get("geglu_alpha"), s.get("glu_clamp_max"), s.get("glu_clamp_min"))
            value = glu_value(gate, up, s["act_func"].removeprefix("d"), s["linear_offset"], *constants)
            dgate, dup = torch.autograd.grad(value, (gate, up), grad * given.prob[:, None])
        if given.sfa is None:
            given.d_row.copy_(woven(dgate, dup))
        else:
            self.give(given, "d_row", woven(dgate, dup))
        if given.dbias is not None:  # by atomics, in BF16
            assert not s["_deterministic"] and given.dbias.dtype == torch.bfloat16 and not given.dbias.any()
            given.dbias.squeeze(2).copy_(torch.zeros(given.dbias.shape[:2]).index_add_(0, group, woven(dgate, dup)))
        parts = grad * value.detach()
        if s["_deterministic"]:  # a slot for each tile of 256 columns
            for slot, tile in enumerate(parts.split(256, 1)):
                given.dprob[:, slot, 0] = tile.sum(1)
        else:
            given.dprob += parts.sum(1)


class GroupedGemmWgradSm100(Operation):
    def compute(self, given: Any) -> None:
        ends, block = given.offsets.tolist(), self.settings["sf_vec_size"]
        a = given.a if given.sfa is None else values(given.a.T if given.a.stride(0) == 1 else given.a)
        a = a.T if given.sfa is not None and given.a.stride(0) == 1 else a.float()
        b = values(given.b) if given.b.stride(1) == 1 else values(given.b.T).T
        assert ends[-1] == b.shape[0]
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            left, right = a[:, start:end].float(), b[start:end].float()
            if given.sfa is not None and end > start:  # the scales of a group lie together
                for_a, for_b = (
                    sf.reshape(-1)[high * start // block : high * end // block]
                    for sf, high in ((given.sfa, -(-a.shape[0] // 128) * 128), (given.sfb, -(-b.shape[1] // 128) * 128))
                )
                left = left * scales(for_a, *left.shape, block)
                right = right * scales(for_b, *right.T.shape, block).T
            product = left @ right
            if given.global_scale_a is not None:
                product = product * given.global_scale_a[g] * given.global_scale_b[g]
            if given.sfa is not None:
                assert given.descriptor_workspace.numel() >= 512 * len(ends)
            given.wgrad[g].copy_(product + (given.wgrad[g].float() if self.settings["accumulate_on_output"] else 0))


class Flat(Operation):
    """One whose matrices have three dimensions."""

    def execute(self, **arguments: Any) -> None:
        for name, value in arguments.items():
            assert not isinstance(value, Tensor) or value.dim() != 6 or value.permute(5, 2, 4, 0, 1, 3).is_contiguous()
            assert name.removesuffix("_tensor") in _TWO_DIMENSIONS or not isinstance(value, Tensor) or value.dim() > 2
        super().execute(**arguments)


_TWO_DIMENSIONS = ("alpha", "padded_offsets", "bias", "norm_const", "amax", "workspace")


def srelu_value(t: Tensor, clamp: float | None) -> Tensor:
    t = t.clamp(min=0)
    return t**2 if clamp is None else (clamp * torch.tanh(t / clamp)) ** 2


class GroupedGemmSreluSm100(Flat):
    def compute(self, given: Any) -> None:
        given = SimpleNamespace(**{name: flat(name, value) for name, value in vars(given).items()})
        acc, group = self.products(given)
        acc = acc * given.alpha[group, None]
        if given.bias is not None:
            acc = acc + given.bias.T[group].float()
        given.c.copy_(acc)
        self.give(given, "d", srelu_value(acc, self.settings["tanh_clamp_scale"]) * given.prob[:, None])


class GroupedGemmDsreluSm100(Flat):
    def compute(self, given: Any) -> None:
        given = SimpleNamespace(**{name: flat(name, value) for name, value in vars(given).items()})
        acc, group = self.products(given)
        grad = acc * given.alpha[group, None]
        with torch.enable_grad():
            preact = given.c.float().requires_grad_()
            value = srelu_value(preact, self.settings["tanh_clamp_scale"])
            (dpreact,) = torch.autograd.grad(value, preact, grad * given.prob[:, None])
        self.give(given, "d_row", dpreact)
        act = value.detach() * given.prob[:, None]
        if given.sfd_col_d_srelu is None:
            given.d_srelu.copy_(act)
        else:
            _give_columns(given.d_srelu, given.sfd_col_d_srelu, act, given.padded_offsets.tolist())
        parts = grad * value.detach()
        if self.settings["deterministic"]:
            for slot, tile in enumerate(parts.split(256, 1)):
                given.dprob_workspace[:, slot, 0] = tile.sum(1)
        else:
            given.dprob[:, 0, 0] += parts.sum(1)


class GemmSwigluSm100(Flat):
    def compute(self, given: Any) -> None:
        given = SimpleNamespace(**{name: flat(name, value) for name, value in vars(given).items()})
        acc = self.a(given) @ self.b(given)[0].T * given.alpha
        given.ab12.copy_(acc)
        up, gate = halves(acc)
        given.c.copy_(glu_value(gate, up, "swiglu", 0.0, 0.0, 0.0, 0.0))


class GemmSreluSm100(Flat):
    def compute(self, given: Any) -> None:
        given = SimpleNamespace(**{name: flat(name, value) for name, value in vars(given).items()})
        acc = self.a(given) @ self.b(given)[0].T * given.alpha
        given.c.copy_(acc)
        act = srelu_value(acc, None) * given.prob[:, None]
        if given.sfd is None:
            given.d.copy_(act)
            return
        data, scale, _ = quantize(act, mxfp8())
        given.d.copy_(data)
        _fill(given.sfd, [swizzle_128x4(scale)])
