"""Members: what a block is and does by itself, and what it calls the user's modules that have the same names.

Code generation does not import the runtime: tests/runtime/test_members.py holds these names to what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OF_MODULES = _names("""
    T_destination _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks
    _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs
    _get_backward_hooks _get_backward_pre_hooks _get_name _is_full_backward_hook _load_from_state_dict
    _load_state_dict_post_hooks _load_state_dict_pre_hooks _maybe_warn_non_full_backward_hook _modules _named_members
    _non_persistent_buffers_set _parameters _register_load_state_dict_pre_hook _register_state_dict_hook
    _replicate_for_data_parallel _save_to_state_dict _slow_forward _state_dict_hooks _state_dict_pre_hooks _version
    _wrapped_call_impl add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval
    extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia
    named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory
    state_dict to to_empty train training type xpu zero_grad
""")
"""Members of every ``nn.Module``."""
OF_UNITS = OF_MODULES | _names("""
    _fsdp_use_orig_params _get_fsdp_state _is_fsdp_managed_module _orig_cls_mro_index _set_unshard_async_op reset_iter_state
    reshard set_all_reduce_hook
    set_allocate_memory_from_process_group_for_comm set_custom_all_gather set_custom_reduce_scatter
    set_force_sum_reduction_for_comms set_gradient_divide_factor set_is_last_backward set_modules_to_backward_prefetch
    set_modules_to_forward_prefetch set_post_optim_event set_reduce_scatter_divide_factor
    set_reduce_scatter_max_input_buffers set_reduce_scatter_unused_params set_requires_all_reduce set_requires_gradient_sync
    set_reshard_after_backward set_reshard_after_forward set_separate_reduce_scatter_group set_symm_mem_for_comm
    set_unshard_in_backward unshard
""")
"""Members of what ZeRO was applied to: FSDP2 gives a module methods of its own."""
OF_BLOCKS = OF_UNITS | _names("""
    _bindings _constants _container _device constant constant_keys data_mesh declarations declare entries fill_constants name
    paths recomputes share tensor zero_stage
""")
"""Members of an emitted block."""


def attribute_paths(paths: Sequence[str]) -> Mapping[str, str]:
    """Where a block has each of the user's dotted paths: there, but for parts that are members of the block (or of the
    modules inside it), which get an underscore: ``tensor.weight`` -> ``tensor_.weight``."""
    beside: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            beside.setdefault(tuple(parts[:depth]), set()).add(part)
    return {path: ".".join(_attributes(path.split("."), beside)) for path in paths}


def _attributes(parts: Sequence[str], beside: Mapping[tuple[str, ...], set[str]]) -> Iterable[str]:
    for depth, part in enumerate(parts):
        members = OF_MODULES if depth else OF_BLOCKS
        yield spare(part, members | beside[tuple(parts[:depth])]) if part in members else part


def spare(name: str, taken: Iterable[str]) -> str:
    """The name, with underscores until nothing else is called so."""
    others = frozenset(taken)
    while name in others:
        name += "_"
    return name
