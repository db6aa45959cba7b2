GPUS=${GPUS:-8}
ACTOR=${ACTOR:-4}
python3 train_async.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node "${ACTOR}" --rollout-num-gpus $((GPUS - ACTOR)) \
   --hf-checkpoint /models/base --prompt-data /data/train.jsonl --input-key question \
   --num-epoch 2 --rollout-batch-size 16 --n-samples-per-prompt 4 --num-steps-per-rollout 2 \
   --rollout-max-prompt-len 512 --rollout-max-response-len 1024 \
   --advantage-estimator ppo --lambd 0.95 --normalize-advantages --num-critic-only-steps 3 \
   --kl-coef 0.01 --kl-loss-type k2 --calculate-per-token-loss --eps-clip 0.1 \
   --custom-rm-path my_rewards.score --micro-batch-size 2 --rollout-num-gpus-per-engine 2 \
   --lr-decay-style cosine --lr-warmup-fraction 0.1
