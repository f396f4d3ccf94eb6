"""Tables of the options of timm's train.py that this package spells otherwise, ignores or does not support."""

RENAMED = {
    "data": "data_dir", "drop_connect": "drop_path", "initial_checkpoint": "pretrained_path", "input_size": "img_size",
}  # fmt: skip
MODEL_ARGUMENTS = {"drop": "drop_rate", "gp": "global_pool"}  # options that timm's train.py passes to the model
# options without counterpart, with the value by which timm trains as this package does
UNSUPPORTED = {
    "amp_impl": "native", "apex_amp": False, "aug_splits": 0, "bce_pos_weight": None, "bn_eps": None,
    "bn_momentum": None, "class_map": "", "clip_mode": "norm", "color_jitter_prob": None, "cooldown_epochs": 0,
    "cutmix_minmax": None, "dataset_download": False, "dataset_trust_remote_code": False, "decay_epochs": 90,
    "decay_milestones": [90, 180, 270], "decay_rate": 0.1, "dist_bn": "reduce", "distill_loss_weight": None,
    "drop_block": None, "epoch_repeats": 0, "eval_metric": "top1", "gaussian_blur_prob": None, "grayscale_prob": None,
    "head_init_bias": None, "head_init_scale": None, "in_chans": 3, "input_img_mode": "RGB", "input_key": None,
    "jsd_loss": False, "kd_distill_type": "logit", "kd_loss_type": "kl", "kd_model_name": None,
    "kd_student_feature_dim": None, "kd_teacher_feature_dim": None, "kd_temperature": 4,
    "kd_token_distill_type": "soft",
    "layer_decay_min_scale": 0, "layer_decay_no_opt_scale": None, "lr_base": None, "lr_base_scale": "",
    "lr_base_size": 256, "lr_cycle_decay": 0.5, "lr_cycle_limit": 1, "lr_cycle_mul": 1, "lr_k_decay": 1,
    "lr_noise": None, "lr_noise_pct": 0.67, "lr_noise_std": 1, "mean": None, "mixup_mode": "batch",
    "mixup_off_epoch": 0, "model_dtype": None, "model_ema_warmup": False, "momentum": 0.9, "naflex_loader": False,
    "naflex_loss_scale": "linear", "naflex_max_seq_len": 576, "naflex_patch_size_probs": None,
    "naflex_patch_sizes": None, "naflex_patchify_channels_first": False,
    "naflex_train_seq_lens": [128, 256, 576, 784, 1024], "native_amp": False, "no_aug": False, "no_resume_opt": False,
    "opt_kwargs": {}, "patience_epochs": 10, "pretrained": False, "recount": 1, "resplit": False,
    "sched_on_updates": False, "split_bn": False, "start_epoch": None, "std": None, "sync_bn": False,
    "target_key": None, "task_loss_weight": None, "train_batch_sizes": None, "train_batches_per_epoch": None,
    "train_crop_mode": "rrc", "train_img_sizes": None, "train_num_samples": None, "train_size_probs": None,
    "train_size_random_mix": 0.1, "train_size_schedule": "constant", "train_size_schedule_spread": 0.65, "tta": 0,
    "val_num_samples": None, "variable_batch_loss_scale": "none", "vflip": 0, "warmup_prefix": False,
}  # fmt: skip
# options that matter only if another option is on
ONLY_WITH = {
    "aug_splits": "resplit split_bn",
    "bce_loss": "bce_pos_weight",
    "clip_grad": "clip_mode",
    "kd_model_name": "distill_loss_weight kd_distill_type kd_loss_type kd_student_feature_dim kd_teacher_feature_dim "
    "kd_temperature kd_token_distill_type task_loss_weight",
    "layer_decay": "layer_decay_min_scale layer_decay_no_opt_scale",
    "lr_noise": "lr_noise_pct lr_noise_std",
    "naflex_loader": "naflex_loss_scale naflex_max_seq_len naflex_patch_size_probs naflex_patch_sizes "
    "naflex_patchify_channels_first naflex_train_seq_lens",
    "reprob": "recount",
    "train_img_sizes": "train_batch_sizes train_size_probs train_size_random_mix train_size_schedule "
    "train_size_schedule_spread variable_batch_loss_scale",
}
SWITCHES = {name: switch for switch, names in ONLY_WITH.items() for name in names.split()}
SCHEDULES = {
    "decay_epochs": ("step",), "decay_milestones": ("multistep",), "decay_rate": ("step", "multistep", "poly"),
    "lr_k_decay": ("cosine", "poly"), "patience_epochs": (),
}  # fmt: skip
# options that change speed, logging or storage but not what is trained
HARMLESS = {
    "channels_last", "checkpoint_hist", "device_modules", "distributed", "fast_norm", "fuser", "grad_accum_steps",
    "local_rank", "model_ema_force_cpu", "no_ddp_bb", "no_prefetcher", "pin_mem", "prefetcher", "rank",
    "recovery_interval", "save_images", "synchronize_step", "torchcompile_mode", "torchscript",
    "use_multi_epochs_loader", "val_interval", "validation_batch_size", "wandb_project", "wandb_resume_id",
    "wandb_tags", "worker_seeding", "world_size",
}  # fmt: skip
ONLY_TIMMS = {*RENAMED, *MODEL_ARGUMENTS, *UNSUPPORTED, *HARMLESS}
