N=48
freq=()
for ((i=0; i<N; i++)); do
  freq+=(1)
done
MODEL_ARGS=(
   --swiglu
   --num-layers 48
   --hidden-size 2048
   --num-experts 128
   --rotary-base "${ROTARY_BASE:-1000000}"
   --moe-token-dispatcher-type alltoall
   --moe-aux-loss-coeff 0
)
