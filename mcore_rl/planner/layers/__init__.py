"""Tensors that autograd saves in a layer."""
