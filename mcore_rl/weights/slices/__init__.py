"""Slices of a weight sync: every engine rank receives exactly the part of each HF tensor that it keeps.

    shard_map = ShardMap(rows, EngineLayout(tp=2))                          # the part of each tensor that a rank keeps
    route_map = RouteMap(Placement(rows, layout), shard_map, locations)     # the trainer ranks that may send it
    router = SliceRouter(route_map)                                         # the trainer rank that sends it
    for bucket, piece in shard_map.pieces(bucket_bytes):
        for route in router.routes(piece): ...                              # identical in every process

Pure functions of both layouts and of the hosts and devices of the ranks. Nothing in this folder moves data.
"""
