"""A small case of each kernel, for compute-sanitizer."""

import torch

from cute_kernels import fp8_reference as fp8
from cute_kernels.activation import Activation
from cute_kernels.hopper import function as hopper

torch.manual_seed(0)
sizes = torch.tensor([300, 0, 5, 128], device="cuda")
T, k, i = 500, 272, 192
offs, pad = hopper("padded_group_offsets")(sizes, T)
x = torch.randn(T, k, device="cuda").bfloat16()
xq = fp8.fp8_quantize(x, offs, pad, columnwise=False)[:2]
SW = Activation("swiglu")
w = fp8.fp8_quantize_weight([torch.randn(4, 2 * i, k, device="cuda").bfloat16()], False)[:2]
y = hopper("fp8_grouped_gemm")(*xq, *w, offs)
act, pre = hopper("fp8_grouped_gemm_act")(*xq, *w, offs, pad, SW, None, torch.rand(T, device="cuda"))
w2 = fp8.fp8_quantize_weight([torch.randn(4, k, i, device="cuda").bfloat16()], True)[2:4]
d, dp = hopper("fp8_grouped_gemm_dact")(
    *xq, *w2, offs, pad, pre, SW, torch.rand(T, device="cuda"), need_dprobs=True, need_dbias=True
)
torch.cuda.synchronize()
print("ran", y.float().abs().sum().item() > 0, dp.isfinite().all().item())
