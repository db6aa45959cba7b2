"""The only door to megatron.core: build, step, optim, checkpoint, roles, lora, cpu. Importing this package imports
nothing; every module below it that imports megatron.core calls `cpu.install()` first, so any import order is safe.

How an actor is made, on every rank (all of it collective):

    layout = train_layout(config.actor.parallel, world_size, hf_config)  # ConfigError for an invalid layout
    parallel.initialize(layout, rank=r, init_method="tcp://127.0.0.1:29500", device="cpu", timeout_seconds=600, seed=1)
    chunks = model.build_model(hf_config, config.actor, config.model, layout)      # one PolicyModel per VPP chunk
    loading.load_hf(chunks, config.model.hf_path, layout)                          # complete both ways, or an error
    ...
    parallel.destroy()

`chunks` then go into Float16Module (bfloat16), DistributedDataParallel and forward_backward_func. In a forward step:

    sequences = attention.pack_sequences(lengths)      # lengths sum to T; T divisible by tp (see output.py)
    hidden = chunk(tokens[None], None, None, packed_seq_params=sequences)          # last stage: [T, h]
    weight = output.output_weight(chunk)                                           # [V / tp, h]

`names.canonical_tensors(chunks)` names what this rank holds for the converters, the weight sync and checks.
"""
