"""Fused operations: several ops run by kernels of `cute_kernels.ops`. The rules name them; loaded when first used."""
