#!/bin/bash
if [ "$#" -lt 2 ]; then
    echo "usage: sft.sh GPUS DIRECTORY [key=value ...]"
    exit 1
fi
gpus=$1
out=$2
shift 2

torchrun --standalone --nnodes=1 --nproc_per_node=$gpus \
     -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.prompt_key=question \
    data.response_key=answer \
    data.train_batch_size=128 \
    data.max_length=2048 \
    optim.lr=1e-4 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.1 \
    model.partial_pretrain=/models/base \
    model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear \
    trainer.default_local_dir=$out \
    trainer.experiment_name=gsm8k-sft \
    trainer.total_training_steps=40 $@ \
    ulysses_sequence_parallel_size=2
