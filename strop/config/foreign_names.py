"""What other frameworks (slime, verl, TRL, OpenRLHF) call the options of strop, for the answer to a name that strop does not
have. Nothing is ever set through these names."""

from __future__ import annotations

_BY_OPTION = {
    "algorithm.advantage.normalize_std": "disable_grpo_std_normalization norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.correction.kind": "use_tis rollout_is use_rollout_correction vllm_importance_sampling_correction",
    "algorithm.correction.max_ratio": "tis_clip rollout_is_threshold vllm_importance_sampling_cap",
    "algorithm.correction.min_ratio": "tis_clip_low",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.kl.coef": "kl_loss_coef init_kl_coef kl_penalty_coef beta use_kl_loss use_kl_in_reward",
    "algorithm.kl.kind": "kl_loss_type kl_estimator kl_penalty",
    "algorithm.kl.refresh_steps": "ref_update_interval ref_model_sync_steps",
    "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.policy_loss.eps_clip": "epsilon cliprange clip_ratio clip_ratio_low eps_clip_low",
    "algorithm.policy_loss.eps_clip_c": "clip_ratio_c",
    "algorithm.policy_loss.eps_clip_high": "epsilon_high clip_ratio_high",
    "algorithm.policy_loss.kind": "policy_loss_type loss_mode importance_sampling_level",
    "algorithm.preset": "adv_estimator algorithm_name",
    "algorithm.reduction": "loss_agg_mode loss_type calculate_per_token_loss",
    "algorithm.updates_per_batch": "global_batch_size ppo_mini_batch_size num_iterations ppo_epochs num_steps_per_rollout",
    "data.path": "prompt_data train_files train_dataset",
    "engine.max_sequences": "max_num_seqs rollout_num_concurrent",
    "eval.every_steps": "eval_interval test_freq eval_steps",
    "model.path": "hf_checkpoint model_name_or_path pretrain",
    "reward.kind": "rm_type reward_funcs",
    "rollout.group_size": "n_samples_per_prompt num_generations rollout_n",
    "rollout.max_response_tokens": "rollout_max_response_len max_completion_length max_response_length max_new_tokens max_resp",
    "rollout.prompts_per_step": "rollout_batch_size train_batch_size batch_size",
    "run.checkpoint_every_steps": "save_interval save_freq save_steps",
    "run.folder": "output_dir save default_local_dir",
    "run.num_steps": "num_rollout max_steps total_training_steps num_train_epochs",
    "trainer.adam_eps": "adam_epsilon",
    "trainer.beta1": "adam_beta1",
    "trainer.beta2": "adam_beta2",
    "trainer.lr": "learning_rate actor_learning_rate",
    "trainer.lr_schedule": "lr_decay_style lr_scheduler_type lr_scheduler",
    "trainer.max_grad_norm": "clip_grad grad_clip",
    "trainer.max_tokens_per_micro_batch": "max_tokens_per_gpu micro_batch_size per_device_train_batch_size",
    "trainer.warmup_steps": "lr_warmup_iters warmup_ratio lr_warmup_steps",
}
OPTION_OF = {name: option for option, names in _BY_OPTION.items() for name in names.split()}
