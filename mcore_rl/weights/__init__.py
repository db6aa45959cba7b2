"""Live weight sync: trainer ranks write slices of HF tensors into staging buffers, engine ranks load them."""
