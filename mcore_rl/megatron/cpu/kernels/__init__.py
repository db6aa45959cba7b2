"""Single-pass CPU kernels where eager torch walks through memory once per operation.

What TransformerEngine's fused kernels are on a GPU: the same functions, in float32 and float64, compiled by numba for
one core, which is what a rank has. Their oracles are the torch compositions that they replace.
"""
