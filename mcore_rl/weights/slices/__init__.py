"""Own slices: every engine rank gets what it needs of each HF tensor, from a trainer rank that has it, and no more.

    needs = Needs(rows, EngineLayout(tp=2))                  # what each rank of an engine takes of each tensor
    router = Router(Placement(rows, layout), needs, places)  # which trainer rank sends it
    for bucket, chunk in needs.chunks(bucket_bytes):
        for route in router.routes(chunk): ...               # the same in every process

Pure functions of the two layouts and of where the ranks run; nothing here moves a byte.
"""
