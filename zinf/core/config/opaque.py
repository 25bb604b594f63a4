"""The keys of DeepSpeed's sections that zinf does not read as a whole.

zinf reads only flags such as "enabled" in them; a mistyped key is still an error. Keys
as in DeepSpeed 0.19.6.
"""

from collections.abc import Iterator, Mapping

from zinf.core.config.nearest import unknown_key

KEYS = {
    "autotuning": """
        enabled fast results_dir exps_dir overwrite metric metric_path
        start_profile_step end_profile_step tuner_type tuner_early_stopping
        tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size
        max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu
        num_tuning_micro_batch_sizes mp_size model_info model_info_path""",
    "checkpoint": """
        tag_validation load_universal use_node_local_storage parallel_write
        checkpoint_serialization writer""",
    "comet": """
        enabled samples_log_interval project workspace api_key experiment_name
        experiment_key online mode""",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "compile": """
        enabled backend kwargs deepcompile free_activation free_activation_threshold
        offload_activation offload_opt_states offload_parameters double_buffer
        disable symmetric_memory debug_log sync_before_reduce sync_after_reduce
        sync_before_allgather sync_after_allgather keep_int_input_tensors
        keep_all_input_tensors passes""",
    "compression_training": """
        weight_quantization activation_quantization sparse_pruning row_pruning
        head_pruning channel_pruning layer_reduction""",
    "eigenvalue": """
        enabled verbose max_iter tol stability gas_boundary_resolution layer_name
        layer_num model_name""",
    "elasticity": """
        enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus
        num_gpus_per_node model_parallel_size min_time prefer_larger_batch
        ignore_non_elastic_batch_info version""",
    "flops_profiler": """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed
        output_file""",
    "hybrid_engine": """
        enabled max_out_tokens inference_tp_size release_inference_cache
        pin_parameters tp_gather_partition_size enable_cuda_graph""",
    "leaf_module": "classes names name_suffixes",
    "nebula": """
        enabled persistent_storage_path persistent_time_interval
        num_of_version_in_retention enable_nebula_load load_path""",
    "progressive_layer_drop": "enabled theta gamma",
    "timers": "throughput",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "trackio": "enabled project",
    "wandb": "enabled group team project",
    "zenflow": """
        topk_ratio select_strategy select_interval update_interval overlap_step
        offload auto_ratio full_warm_up_rounds pt_reserved_cores_perc
        steps_per_epoch""",
}


def known_below(key: str) -> list[str]:
    """The keys that are allowed below `key`; none if they are not checked."""
    return KEYS.get(key, "").split()


def unknown_below(key: str, value: object) -> Iterator[tuple[str, str]]:
    """The keys of `value` that are not allowed below `key`, each with a message."""
    if key in KEYS and isinstance(value, Mapping):
        allowed = known_below(key)
        for below in value:
            if below not in allowed:
                yield below, unknown_key(below, allowed)
