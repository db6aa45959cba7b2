"""Models from a specification: layers, attention, routers, names, loading, process groups."""
