"""Run a chain with an op and a rule of one's own, and compare it with the same chain unfused."""

import torch
from softcap import RULE, Softcap

import fusible_ops as fo
from patterns import RULES

linear = fo.BasicLinear(64, 32, device="cpu")
fused = fo.Sequential(linear, Softcap(30.0), rules=(RULE, *RULES), on_unfused="error")
plain = fo.Sequential(*fused, rules=())
x = 20 * torch.randn(8, 64)
results = []
for model in (fused, plain):
    inner = x.clone().requires_grad_()
    y = model(inner)
    results.append((y, *torch.autograd.grad(y.square().sum(), [inner, linear.weight])))
for ours, theirs in zip(*results, strict=True):
    torch.testing.assert_close(ours, theirs)
print(fused.explain())
print("fused and unfused agree")
