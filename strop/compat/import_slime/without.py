"""Flags of slime, Megatron and SGLang that have no counterpart in strop, by the reason why."""

from __future__ import annotations

# reason -> flags
_REASONS: dict[str, str] = {
    "strop's trainers divide weights and batches over processes, layers by trainer.tensor_parallel, rows by "
    "trainer.context_parallel or stages by trainer.pipeline_parallel, and have no other parallelism.": """
        --sequence-parallel
        --expert-model-parallel-size --expert-tensor-parallel-size --decoder-first-pipeline-num-layers
        --decoder-last-pipeline-num-layers --num-layers-per-virtual-pipeline-stage --virtual-pipeline-model-parallel-size
        --overlap-grad-reduce --overlap-param-gather --overlap-p2p-communication
        --distributed-backend --distributed-timeout-minutes --allgather-cp --cp-comm-type""",
    "strop's trainer is torch's FSDP2; on GPUs trainer.kind = megatron makes the model of Megatron-Core's layers: set it.": """
        --train-backend""",
    "strop has stages with trainer.kind = megatron: set trainer.pipeline_parallel, beside trainer.num_processes.": """
        --pipeline-model-parallel-size""",
    "strop's processes share what the optimizer remembers (with trainer.kind = megatron, trainer.distributed_optimizer).": """
        --use-distributed-optimizer""",
    "strop's processes are those of trainer.num_processes or of a launcher, its servers those of [engine]: set them there.": """
        --actor-num-nodes --actor-num-gpus-per-node --critic-num-nodes --critic-num-gpus-per-node --rollout-num-gpus
        --tensor-model-parallel-size --context-parallel-size
        --rollout-num-gpus-per-engine --num-gpus-per-node""",
    "strop's engine torch samples from the trainer's own weights; how servers are given them stands in [engine].": """
        --colocate --offload --offload-train --offload-rollout --no-offload-train --no-offload-rollout
        --update-weight-buffer-size --update-weight-mode --update-weight-transport --update-weight-disk-dir
        --update-weight-disk-keep-files --update-weight-delta-encoding --update-weight-delta-checksum
        --update-weight-local-checkpoint-dir --delta-compression --delta-dtype --delta-full-interval
        --custom-update-weight-post-write-path
        --flush-cache-interval --release-train --check-weight-update-equal""",
    "strop keeps activations on the device; trainer.activation_checkpointing computes them again instead.": """
        --cpu-offloading""",
    "strop cuts micro-batches by tokens (trainer.max_tokens_per_micro_batch), and how they are cut changes no gradient.": """
        --micro-batch-size --balance-data --balance-by-flops --data-pad-size-multiplier --qkv-format""",
    "strop trains the critic beside the policy, in one run.": "--critic-train-only",
    "strop's settings of Megatron-Core are those of [trainer] with kind = megatron.": "--megatron-config-path",
    "strop's filter.rollout sees one rollout at a time, and one that it drops leaves its group's statistics too.": """
        --rollout-sample-filter-path""",
    "strop's surplus groups wait in the order they were sampled (filter.surplus); there is no buffer to choose from.": """
        --buffer-filter-path --buffer-sort-by-staleness --over-sampling-filter-path""",
    "strop writes what was learned from to rollouts/, and counts what was dropped; there is no hook for the others.": """
        --rollout-all-samples-process-path""",
    "strop cuts no response off at the end of a step; with rollout.streaming, which samples while it trains, they go on.": """
        --partial-rollout --mask-offpolicy-in-partial-rollout""",
    "strop has no hook for this function of yours.": """
        --rollout-function-path --custom-generate-function-path --rollout-sample-hook-path --eval-function-path
        --custom-rollout-log-function-path --custom-eval-rollout-log-function-path --rollout-data-postprocess-path
        --data-source-path --custom-loss-function-path --custom-advantage-function-path --custom-tis-function-path
        --custom-pg-loss-reducer-function-path --custom-reward-post-process-path --custom-model-provider-path
        --custom-convert-samples-to-train-data-path""",
    "strop ends a response at token ids (rollout.stop_token_ids), not at text.": "--rollout-stop",
    "strop does not drop long prompts: one that does not fit the model is an error that names its row.": """
        --rollout-max-prompt-len --rollout-max-context-len --eval-max-prompt-len --eval-max-context-len""",
    "strop has no least length of a response.": "--eval-min-new-tokens",
    "strop's prompts are text: there are no tools, images or settings of the chat template.": """
        --tool-key --eval-tool-key --multimodal-keys --apply-chat-template-kwargs""",
    "strop does not read that file: write a table [eval.sets.NAME] for each of its data sets.": "--eval-config",
    "strop's evaluation takes the reward of training, or for a set of prompts one of its own: [eval.sets.NAME.reward].": """
        --eval-reward-key""",
    "strop's losses are those of algorithm.policy_loss.kind; strop sft trains on demonstrations.": """
        --loss-type --pg-loss-type --use-score-centering --score-centering-top-k
        --disable-compute-advantages-and-returns --fipo-decay-rate --fipo-clip-ratio --fipo-dual-clip-c""",
    "strop measures the gap between sampler and trainer in every step (guards.max_logprob_gap) and needs no flag for it.": """
        --get-mismatch-metrics""",
    "strop replays no routing of experts.": """
        --use-routing-replay --use-rollout-routing-replay --routing-replay-prefetch-microbatches""",
    "strop trains all weights by AdamW, its moments kept from step to step.": """
        --only-train-params-name-list --freeze-params-name-list --freeze-indexer --reset-optimizer-states
        --use-stateless-adam --sgd-momentum""",
    "strop reads Hugging Face folders (model.path), not Megatron's checkpoints; the reference is the model before step 1.": """
        --load --ref-load --ref-ckpt-step --ckpt-step --ckpt-format --megatron-to-hf-mode --model-name
        --no-load-optim --no-load-rng --finetune""",
    "strop writes a Hugging Face folder, model/ in the run folder, and checkpoints that a run can go on from.": """
        --save-hf --async-save --no-save-optim --no-save-rng --async-strategy""",
    "strop writes metrics.jsonl, rollouts/ and report.html in the run folder, and sends nothing anywhere.": """
        --log-multi-turn --log-passrate --log-reward-category --log-correct-samples --log-interval
        --tensorboard-dir""",
    "strop records what it samples in rollouts/: strop replay, strop rollout and strop train --from-rollouts work on that.": """
        --save-debug-rollout-data --load-debug-rollout-data --load-debug-rollout-data-subsample --save-debug-train-data
        --load-forge-rollout-data --debug-rollout-only --debug-train-only --dump-details""",
    "strop keeps rollouts in memory, in one process: there is no buffer service, store or proxy.": """
        --rollout-buffer-url --fetch-trajectory-retry-times --min-batch-collection-ratio --rollout-task-type
        --rollout-data-transport --rollout-data-dir --rollout-storage-profile --rollout-storage-declaration
        --rollout-queue-run-id --rollout-queue-online-gc --rollout-queue-lease-seconds --rollout-queue-segment-mib""",
    "strop reads the model's shape and its kernels' settings from the model folder (config.json).": """
        --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --group-query-attention
        --kv-channels --vocab-size --padded-vocab-size --make-vocab-size-divisible-by --max-position-embeddings
        --seq-length --position-embedding-type --normalization --norm-epsilon --swiglu --disable-bias-linear
        --add-qkv-bias --qk-layernorm --use-rotary-position-embeddings --untie-embeddings-and-output-weights
        --tie-word-embeddings --spec --attention-dropout --hidden-dropout --attention-softmax-in-fp32
        --attention-backend --transformer-impl --multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim
        --qk-pos-emb-head-dim --v-head-dim --mscale --mscale-all-dim --num-experts --no-rope-fusion
        --post-self-attn-layernorm --post-mlp-layernorm --use-gated-attention --attention-output-gate
        --apply-layernorm-1p --qwen-gdn-backend --no-masked-softmax-fusion --no-bias-swiglu-fusion
        --no-persist-layer-norm --cross-entropy-loss-fusion --enable-experimental --squared-relu
        --attn-implementation --hybrid-override-pattern --mamba-num-heads --mamba-head-dim --mamba-state-dim
        --mamba-num-groups""",
    "strop goes on from a checkpoint's own step: strop train CONFIG --resume.": "--start-rollout-id",
    "strop spreads prompts over its servers by itself; a router of SGLang's stands in engine.router, and slime's is none.": """
        --use-slime-router""",
    "strop notices a lost server by a request that fails, and brings it back: there are no health checks to set.": """
        --use-fault-tolerance --rollout-health-check-interval --rollout-health-check-timeout
        --rollout-health-check-first-wait""",
    "strop asks each server itself, without a proxy, and waits for it as long as engine.request_timeout_s says.": """
        --rollout-cleanup-timeout --rollout-session-id --http-proxy --use-distributed-post""",
    "strop's processes have the environment of the command: set it there.": "--train-env-vars",
    "strop samples with the newest weights; old log-probabilities are taken before a batch's first update, without a copy.": """
        --keep-old-actor --update-weights-interval""",
    "strop keeps AdamW's moments and master weights in float32 on model.device: none are moved to the CPU or narrowed.": """
        --optimizer-cpu-offload --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d
        --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype""",
    "strop sums gradients in float32 over micro-batches and processes.": """
        --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --no-gradient-accumulation-fusion""",
    "strop trains and samples in float32 or bfloat16 (model.dtype), never in 8 bits.": """
        --fp8-format --fp8-recipe --fp8-param-gather --force-fp8-ue8m0-scale""",
    "strop never holds the logits of a whole batch, and cuts every pass by trainer.max_tokens_per_micro_batch.": """
        --log-probs-chunk-size --log-probs-max-tokens-per-gpu --recompute-loss-function""",
    "strop has no switch for it: on a CPU a run of the same seed is the same bit for bit, on a GPU kernels may differ.": """
        --deterministic-mode""",
    "strop's schedules go from 0 to trainer.lr in the warm-up, and to 0 at the end of the run.": """
        --lr-warmup-init --lr-decay-iters --lr-wsd-decay-style --lr-wsd-decay-iters""",
    "strop goes on with the schedule of its config after --resume.": """
        --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler""",
    "strop trains no heads that predict several tokens at once.": """
        --enable-mtp-training --mtp-num-layers --mtp-loss-scaling-factor""",
    "strop learns from exactly the tokens that were sampled: no mask is made from a chat template.": "--loss-mask-type",
    "strop reads no second file: what your function needs stands in [reward.args].": "--custom-config-path",
    "strop makes no mask from the entropy of tokens.": "--use-rollout-entropy",
    "a switch of slime's own tests.": """
        --ci-test --ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold --ci-save-grad-norm
        --ci-load-grad-norm""",
    "strop stops at a loss or gradient that is not finite, always.": "--no-check-for-nan-in-loss-and-grad",
    "strop has no recorder of memory.": """
        --memory-snapshot-dir --memory-snapshot-num-steps --memory-recorder --record-memory-history""",
    "strop's profiler traces the steps after the first one, as many as run.profile_steps says: set it.": """
        --profile-target --use-pytorch-profiler --profile-step-start --profile-step-end --profile""",
    "strop keeps rollouts in memory, and needs no threads for files of them.": "--rollout-io-concurrency",
    "strop's adapters (LoRA) are the table [lora], which this command does not fill in: set lora.rank.": """
        --use-lora --lora-rank --lora-alpha --lora-target-preset --lora-weight-decay --lora-learning-rate --lora-load
        --save-lora --lora-save-merged-hf""",
    "strop's prompts are text: there is no processor of images.": "--processor",
    "strop has one teacher at most; slime's main branch has no such flag.": """
        --use-mopd --mopd-teacher-mode --mopd-distill-type --mopd-topk-k --mopd-alpha --mopd-eps-low --mopd-eps-high
        --mopd-sampling-logprobs-key""",
}

WITHOUT = {flag: reason for reason, flags in _REASONS.items() for flag in flags.split()}

# How the names of whole families begin, and the reason.
FAMILIES = {
    "--sglang-router-": "strop spreads prompts over servers by itself; a router that is there already stands in engine.router.",
    "--sglang-": "strop samples by its own engine; for SGLang servers that strop starts it stands in engine.server_args.",
    "--router-": "strop starts no router; one that is there already stands in engine.router.",
    "--slime-router-": "strop starts no router; one of SGLang's that is there already stands in engine.router.",
    "--wandb-": "strop writes metrics.jsonl and report.html in the run folder, and sends nothing anywhere.",
    "--use-wandb": "strop writes metrics.jsonl and report.html in the run folder, and sends nothing anywhere.",
    "--disable-wandb-": "strop writes metrics.jsonl and report.html in the run folder, and sends nothing anywhere.",
    "--tb-": "strop writes metrics.jsonl and report.html in the run folder, and sends nothing anywhere.",
    "--use-tensorboard": "strop writes metrics.jsonl and report.html in the run folder, and sends nothing anywhere.",
    "--moe-": "strop reads the model's shape and its kernels' settings from the model folder (config.json).",
    "--rotary-": "strop reads the model's shape and its kernels' settings from the model folder (config.json).",
    "--linear-": "strop reads the model's shape and its kernels' settings from the model folder (config.json).",
    "--experimental-": "strop reads the model's shape and its kernels' settings from the model folder (config.json).",
    "--custom-megatron-": "strop's trainer.kind = megatron has no hooks, and no kernels to choose from.",
    "--megatron-deepgemm-": "strop's trainer.kind = megatron has no hooks, and no kernels to choose from.",
    "--fsdp-": "strop's trainer shards weights by FSDP2 where trainer.num_processes is above 1, and has no options of it.",
}


def reason_without(flag: str) -> str:
    """Why a flag has no counterpart; of one that nobody knows, that."""
    if flag in WITHOUT:
        return WITHOUT[flag]
    reasons = [reason for beginning, reason in FAMILIES.items() if flag.startswith(beginning)]
    return reasons[0] if reasons else "not a flag of slime that strop knows."
