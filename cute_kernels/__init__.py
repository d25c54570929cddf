"""Kernels of fused grouped MLPs: tensors in, tensors out. See `ops` for the entry points and `reference` for their
meaning.
"""
