"""Construction of Megatron models: layers, attention, routers, names, loading, process groups."""
