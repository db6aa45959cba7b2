"""All code that uses megatron.core: model, step, optim, checkpoint, roles, lora, cpu. No other package imports
megatron.core. Importing this package imports nothing; the folders with modules that import megatron.core call
`cpu.install()` in their __init__, so any import order is safe.

Building an actor, on every rank (`initialize` and `build_model` are collective):

    role = ModelRole.policy(config.actor, config.model)
    spec = ResolvedModel.policy(role, world_size)                    # ConfigError for an invalid layout
    parallel.initialize(spec.layout, rank=r, init_method="tcp://127.0.0.1:29500", timeout_seconds=600, seed=1)
    chunks = model.build_model(spec)                                 # one PolicyModel per VPP chunk
    loading.load_hf(chunks, config.model.hf_path, spec.layout)       # error if any tensor has no match
    ...
    parallel.destroy()

The chunks are then wrapped in Float16Module (bfloat16) and DistributedDataParallel, and passed to
forward_backward_func. In a forward step:

    sequences = attention.pack_sequences(lengths)      # lengths sum to T; T divisible by tp (see output.py)
    hidden = chunk(tokens[None], None, None, packed_seq_params=sequences)          # last stage: [T, h]
    weight = output.output_weight(chunk)                                           # [V / tp, h]

`names.canonical_tensors(chunks)` returns this rank's tensors by the names that converters, weight sync and checks use.
"""
