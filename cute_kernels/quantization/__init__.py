"""The low-precision formats in plain PyTorch, byte for byte, on any device.

`formats` has them as data; `quantize` and `groups` turn tensors into them and back; the other files are what those
need.
"""
