"""Build an expert MLP from ops, run it forward and backward, and ask what it runs on: here, and on a Hopper GPU."""

import torch

import fusible_ops as fo

device = "cuda" if torch.cuda.is_available() else "cpu"
experts, hidden, intermediate, rows = 4, 128, 256, 64
factory = {"bias": False, "device": device, "dtype": torch.bfloat16}
mlp = fo.Sequential(
    fo.GroupedLinear(experts, hidden, 2 * intermediate, **factory),
    fo.ScaledSwiGLU(),
    fo.GroupedLinear(experts, intermediate, hidden, **factory),
)
x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)  # sorted by expert
split_sizes = torch.tensor([20, 0, 30, 14], device=device)  # rows of each expert; the host never reads it
probs = torch.rand(rows, device=device, requires_grad=True)  # the router's weight of each row

y = mlp(x, split_sizes, probs, split_sizes)
y.float().square().mean().backward()
print(f"y {tuple(y.shape)}, dx {tuple(x.grad.shape)}, dprobs {tuple(probs.grad.shape)}\n")
print(mlp.explain(), "\n")
print(mlp.explain(target="sm_90a"))
