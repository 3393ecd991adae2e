"""Primitives of Pallas kernels, divided into local ones and ones that send to other ranks."""

# Operations of a kernel on its own device: Refs and bodies are joined. jdp assumes that the kernel
# reads only memory that it has written, and that it orders its writes.
JOINED = frozenset(
    """
    all_reduce_ffs all_reduce_population_count async_copy_scales_to_tmem async_copy_smem_to_tmem
    async_copy_sparse_metadata_to_tmem async_load async_prefetch async_store_smem async_store_tmem
    barrier barrier_arrive barrier_arrive_and_wait barrier_test barrier_wait bitcast commit_group
    commit_smem commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem core_map cudnn_fusion
    custom_fusion debug_barrier debug_barrier_p delay dma_wait einshape_lo elementwise_inline_asm
    elementwise_inline_asm_p emit_pipeline fused_call fusible griddepcontrol_launch_dependents
    griddepcontrol_wait has_memory_space inline_mgpu inline_mgpu_p jaxpr_call layout_cast load
    masked_cummax masked_cummin masked_cumsum masked_load masked_sort masked_swap matmul_acc_lhs
    matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs max_contiguous mgpu_atomic_store mma
    mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
    mpmd_map multiple_of num_programs pack pack_elementwise pallas_call parallel_loop pipeline_body
    print_layout program_id program_order query_cluster_cancel reciprocal relayout
    remove_memory_space roll run_scoped scan_count semaphore_wait set_max_registers
    set_max_registers_p stochastic_round store tcgen05_commit_arrive tcgen05_mma trace_value
    try_cluster_cancel unique unpack unpack_elementwise unreachable wait_gmem_to_smem
    wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
    wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
    with_memory_space_constraint
    """.split()
)

# Memory that other devices or programs write, hidden states, and kernels that jdp cannot open.
SOURCES = frozenset(
    """
    atomic_cas atomic_rmw get_barrier_semaphore get_global mosaic_gpu_p multimem_load_reduce
    multimem_store prng_join prng_random_bits prng_seed prng_split sc_fetch_and_add semaphore_read
    semaphore_signal semaphore_signal_multicast semaphore_signal_parallel thunky.all_gather
    thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start thunky.call_jax
    thunky.call_thunky_nested thunky.collective_group thunky.collective_permute thunky.cond
    thunky.copy thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
    thunky.ptx_kernel thunky.reduce_scatter thunky.while tpu_custom_call
    """.split()
)
