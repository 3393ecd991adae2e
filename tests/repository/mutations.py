"""What `test_mutations.py` breaks: five defects in each room, most of which jdp has had once.

A line "Fixed" of CHANGELOG.md tells of such a defect, and the mutation takes away what mended it.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A defect that is put into a copy of the code.

    Attributes:
      name: the defect.
      file: below `jdp/`.
      text: what is replaced; it stands there once.
      instead: what it is replaced by.
      test: below `tests/`; with one of the sets of its parameters that are run daily it fails.
    """

    name: str
    file: str
    text: str
    instead: str
    test: str


# The room `jdp` has the files directly in that folder.
ROOMS = {
    "reduction": [
        Mutation(
            "with weight= the gradient of a loss with a collective is that of equal ranks",
            "reduction/weighted_sum.py",
            "return _weigh(x, None, self.after, why_not=self.why_not)",
            "return x",
            "reduction/test_weighted_gradients.py::test_a_loss_over_ranks_has_the_gradient_of_one_rank",
        ),
        Mutation(
            "a gradient that stays whole is sent as a slice of another",
            "reduction/sharded_update.py",
            "found = zip(chosen, parts, dims, strict=True)",
            "found = zip(chosen, parts[::-1], dims, strict=True)",
            "reduction/test_reduce_scatter_gradients.py::test_weighted_means_go_along_too",
        ),
        Mutation(
            "parts are averaged over the inner axis alone",
            "reduction/scattered_gradients.py",
            "    if others:\n",
            "    if False:\n",
            "training/test_stage_2.py::test_parts_over_one_of_two_axes_are_averaged_over_both",
        ),
        Mutation(
            "a parameter is gathered from the slices of another",
            "reduction/fsdp_schedule.py",
            "self._gathered.update(zip(members, wholes, strict=True))",
            "self._gathered.update(zip(members[::-1], wholes, strict=True))",
            "training/test_sharded.py::test_trains_as_replicated_does",
        ),
        Mutation(
            "weights whose sum overflows give gradients of 0",
            "reduction/row_weight.py",
            "jnp.where(total < jnp.inf, total, jnp.nan)",
            "total",
            "reduction/test_weights.py::test_a_mean_by_weights_whose_sum_overflows_is_nan",
        ),
    ],
    "training": [
        Mutation(
            "Ctrl-C in a step leaves the caller with a donated state alone",
            "training/step.py",
            "if pytrees.any_deleted(self._donated):",
            "if False:",
            "training/test_interrupts.py::"
            "test_an_interrupt_that_was_put_off_comes_before_the_next_step_donates",
        ),
        Mutation(
            "Python numbers of an Equinox module are trained",
            "training/parameters.py",
            "and _is_of_equinox(state, path)",
            "and False",
            "training/test_libraries.py::"
            "test_number_of_an_equinox_module_that_would_be_trained_is_refused",
        ),
        Mutation(
            "tied weights of nnx are trained as two copies",
            "training/parameters.py",
            "if first != place:",
            "if False:",
            "training/test_shared_variables.py::test_a_variable_at_two_places_is_refused_with_both",
        ),
        Mutation(
            "an average whose decay rounds to 1 in bfloat16 is accepted",
            "training/moment_digits.py",
            "if np.asarray(x.value, dtype) == 1]",
            "if x.value == 1]",
            "training/test_moment_digits.py::test_a_state_that_is_only_described_is_refused_too",
        ),
        Mutation(
            "a call inside of a jit with arrays alone runs as one outside of it",
            "training/step.py",
            "is_traced = jax_compat.is_tracing()",
            "is_traced = False",
            "training/test_repeated_calls.py::"
            "test_a_call_with_arrays_inside_of_a_jit_is_part_of_its_program",
        ),
    ],
    "collectives": [
        Mutation(
            "every bucket is reduced twice",
            "collectives/buckets.py",
            "    return list(map(joined,",
            "    sums = all_reduce(sums, axes, scale=1.0)\n    return list(map(joined,",
            "training/test_step.py::test_equals_plain_jax_on_the_whole_batch",
        ),
        Mutation(
            "two leaves of a bucket change places",
            "collectives/buckets.py",
            "in_order(sums, buckets)",
            "in_order(sums, [bucket[::-1] for bucket in buckets])",
            "reduction/test_gradients.py::test_is_the_mean_over_ranks_in_buckets_of_any_size",
        ),
        Mutation(
            "a native call may block a thread that a collective of XLA's needs",
            "collectives/hazards.py",
            "return found.is_unknown or any(_pairs(found.native, found.xla))",
            "return False",
            "collectives/test_xla_interleaving.py::"
            "test_a_pair_that_does_not_depend_on_each_other_is_found",
        ),
        Mutation(
            "ranks take each other's slices",
            "collectives/cpu/primitives.py",
            "self._rank, self._group = lax.axis_index(axes), _group(axes)",
            "self._rank, self._group = axis.size(axes) - 1 - lax.axis_index(axes), _group(axes)",
            "collectives/test_shards.py::test_every_rank_gets_its_slice_of_the_sum",
        ),
        Mutation(
            "a native call in a cond under vmap has a token for each row",
            "collectives/cpu/primitives.py",
            "x if place is None else lax.index_in_dim(x, 0, place, keepdims=False) for",
            "x for",
            "collectives/test_native_control_flow.py::test_native_calls_give_the_bits_of_xlas",
        ),
    ],
    "checkpoint": [
        Mutation(
            "an interrupted wait lets the next commit write over the one that is written",
            "checkpoint/state_writer.py",
            "            last.result()\n",
            "            pass\n",
            "checkpoint/test_errors_of_writes.py::"
            "test_a_write_that_was_interrupted_as_it_was_begun_is_waited_for",
        ),
        Mutation(
            "a forked process keeps the directory of a dead run locked",
            "checkpoint/directory.py",
            "os.register_at_fork(after_in_child=_close_in_child)",
            "",
            "checkpoint/test_directory.py::"
            "test_a_forked_child_that_outlives_the_run_does_not_keep_its_lock",
        ),
        Mutation(
            "the zeros of devices without values are committed",
            "checkpoint/saved_leaves.py",
            "    if x.is_fully_replicated and len(x.sharding.device_set) > 1:",
            "    if False:",
            "checkpoint/test_callback_values.py::"
            "test_a_checkpoint_refuses_values_that_only_one_device_has",
        ),
        Mutation(
            "local rank 0 frees memory in which others write their commit",
            "checkpoint/host_commits.py",
            "        self.free_earlier()\n        self._marks.write(mark)\n        return True",
            "        self._marks.write(mark)\n        self.free_earlier()\n        return True",
            "checkpoint/test_host_commits.py::"
            "test_areas_of_earlier_lives_are_freed_before_others_may_write_to_their_own",
        ),
        Mutation(
            "a commit under jax.set_mesh fails",
            "checkpoint/snapshot.py",
            "jax.set_mesh(Mesh(np.empty((), object), ())), ",
            "",
            "checkpoint/test_commit_snapshot.py::"
            "test_a_commit_is_taken_under_the_mesh_of_the_script",
        ),
    ],
    "analysis": [
        Mutation(
            "the predicate of a cond counts as uniform",
            "analysis/rules/control_flow.py",
            "index, operands = ins[0] & interp.lattice.varying, ins[1:]",
            "index, operands = 0, ins[1:]",
            "analysis/test_unmatched_collectives.py::"
            "test_a_collective_under_control_flow_that_varies_is_a_deadlock",
        ),
        Mutation(
            "gather_dtype has no effect in a second loss",
            "analysis/lints.py",
            "    if not found:\n",
            "    if True:\n",
            "training/test_mixed_precision_refused.py::"
            "test_a_step_whose_loss_does_not_see_narrow_parameters_is_refused",
        ),
        Mutation(
            "large seeds that differ count as one program",
            "analysis/program_lines.py",
            "return str(int(x))",
            'return f"{int(x):.6g}"',
            "analysis/test_program_lines.py::test_large_seeds_are_told_apart",
        ),
        Mutation(
            "a derivative that jax cannot lower has no line",
            "analysis/step_refusals.py",
            'if layers and "custom_lin" in _primitives(step):',
            "if False:",
            "reduction/test_scanned_layers.py::test_what_is_wrong_on_more_ranks_is_refused_on_one",
        ),
        Mutation(
            "numbers that each rank draws by its own key count as equal",
            "analysis/lints.py",
            'return [name == "axis_index"] * len(eqn.outvars)',
            "return [False] * len(eqn.outvars)",
            "training/test_check_step.py::test_says_what_the_analysis_cannot_see",
        ),
    ],
    "data": [
        Mutation(
            "the sampler is off by one",
            "data/sampler.py",
            "np.divmod(positions, self.num_rows)",
            "np.divmod(positions + 1, self.num_rows)",
            "data/test_sampler.py::test_without_shuffle_rows_keep_their_order",
        ),
        Mutation(
            "a column of pandas is read by label",
            "data/host_arrays.py",
            'return leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf',
            "return leaf",
            "data/test_dataset.py::test_columns_are_read_by_position",
        ),
        Mutation(
            "masked values of an array count",
            "data/host_arrays.py",
            "if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):",
            "if False:",
            "data/test_host_arrays.py::test_a_masked_array_is_refused_where_values_are_masked_out",
        ),
        Mutation(
            "each loader that hangs delays the end by 5 s",
            "data/prefetcher.py",
            "waiting = [reader for reader in list(self.readers) if reader.ask_to_end()]",
            "waiting = (reader for reader in list(self.readers) if reader.ask_to_end())",
            "data/test_prefetch.py::"
            "test_all_loops_are_asked_to_end_before_the_program_waits_for_one",
        ),
        Mutation(
            "large integers wrap around in a loop over batches",
            "data/sharding.py",
            "            host_arrays.require_fits(array, leaf.name)\n",
            "            pass\n",
            "data/test_sharding.py::test_integers_that_32_bits_do_not_hold_are_refused",
        ),
    ],
    "worker": [
        Mutation(
            "builds that differ in comments refuse each other",
            "worker/build_info.py",
            "code_digest(PROTOCOL, Path(package)) == code_digest(PROTOCOL)",
            "False",
            "worker/test_source_digest.py::test_a_process_takes_a_launcher_with_other_comments_and_no_other_one",
        ),
        Mutation(
            "with a phase in every step no step is timed",
            "worker/progress.py",
            "is_counted = self.is_usual or not self._was_usual",
            "is_counted = self.is_usual",
            "worker/test_step_times.py::"
            "test_steps_after_something_else_count_if_it_comes_before_each",
        ),
        Mutation(
            "a run that trains without jdp is ended as if it hung",
            "worker/hang_detector.py",
            "        if all(it.phase in (BEFORE, STARTING) for it in begun.values()):\n"
            "            begun = {}\n",
            "",
            "worker/test_hang_detector.py::test_processes_that_train_without_jdp_are_not_watched",
        ),
        Mutation(
            "GPUs behind an empty entry of CUDA_VISIBLE_DEVICES count",
            "worker/local_devices.py",
            "# name after a blank.\n            break\n",
            "            continue\n",
            "test_cli.py::test_gpus_are_those_that_cuda_sees",
        ),
        Mutation(
            "JDP_RESUME=false continues a run",
            "worker/launcher_client.py",
            ".lower() in SWITCHED_ON",
            '.lower() not in ("", "0")',
            "checkpoint/test_checkpointer.py::"
            "test_a_variable_that_is_switched_off_is_no_resumption",
        ),
    ],
    "launch": [
        Mutation(
            "what hosts know of electors grows with each loss",
            "launch/quorum.py",
            "for name, group in groups.items() if _number(name) > superseded}",
            "for name, group in groups.items()}",
            "launch/test_elections.py::test_electors_that_were_superseded_are_forgotten",
        ),
        Mutation(
            "a host that leaves while its lifeline opens counts as dead",
            "launch/host/leader_connection.py",
            '                    channel.send("farewell")\n',
            "",
            "launch/test_elections.py::"
            "test_a_host_that_leaves_while_its_lifeline_opens_is_not_taken_for_dead",
        ),
        Mutation(
            "a stopped standby replaces a process",
            "launch/host/standby_pool.py",
            "able = [process for process in self._processes if process.can_run()]",
            "able = self._processes",
            "launch/test_launch_parts.py::"
            "test_the_standbys_that_wait_are_taken_first_and_those_that_cannot_run_never",
        ),
        Mutation(
            "a signal to a run that has finished is its exit code",
            "launch/leader/leader.py",
            "elif signal is not None and not generation.is_finished:",
            "elif signal is not None:",
            "launch/test_launch.py::test_a_signal_to_a_run_that_has_finished_changes_nothing",
        ),
        Mutation(
            "a loss of NaN is no JSON in the events",
            "launch/leader/run_report.py",
            "return str(value) if isinstance(value, float) and not math.isfinite(value) else value",
            "return value",
            "launch/test_run_progress.py::test_a_loss_that_json_lacks_is_a_text_among_the_events",
        ),
    ],
    "distributed": [
        Mutation(
            "a failure that the script caught is reported again after restore",
            "distributed/in_flight.py",
            "right = [call for call in _calls if not (call.spec.returns_state and "
            "_wait_for(call.weight))]",
            "right = [*_calls]",
            "distributed/test_in_flight.py::"
            "test_a_failure_that_the_author_caught_is_not_reported_again_after_restore",
        ),
        Mutation(
            "a full disk leaves a part of a line of metrics",
            "distributed/metrics_file.py",
            "        if done:\n            file.truncate",
            "        if False:\n            file.truncate",
            "distributed/test_metrics_file.py::"
            "test_lines_that_a_full_disk_refuses_are_written_once_it_takes_them",
        ),
        Mutation(
            "jdp.log writes a later value of an array",
            "distributed/metrics_log.py",
            "yield name, value.copy() if isinstance(value, np.ndarray) else value",
            "yield name, value",
            "distributed/test_metrics_file.py::"
            "test_an_array_of_numpy_has_the_value_that_it_had_when_it_was_logged",
        ),
        Mutation(
            "a run that begins later continues the metrics of another one",
            "distributed/metrics_file.py",
            "return assigned.resumes or this_process",
            "return is_later or assigned.resumes or this_process",
            "distributed/test_metrics_ownership.py::"
            "test_a_run_that_begins_later_does_not_continue_the_file_of_another_one",
        ),
        Mutation(
            "two steps of a Slurm job have one port",
            "distributed/cluster_env.py",
            "(job + _JOBS_BETWEEN_STEPS * step)",
            "job",
            "distributed/test_initialize.py::test_steps_and_jobs_of_slurm_have_ports_of_their_own",
        ),
    ],
    "tools": [
        Mutation(
            "a plan counts a second group of a model that has one",
            "tools/plan/prediction.py",
            "pair = min(2 * group, whole)",
            "pair = 2 * group",
            "tools/test_plan_costs.py::test_a_model_of_one_group_gathers_no_second_one",
        ),
        Mutation(
            "clocks are compared by collectives of groups of ranks",
            "tools/profiling/summary.py",
            "if is_of_groups or each",
            "if each",
            "tools/test_timeline_clocks.py::"
            "test_collectives_of_groups_of_ranks_do_not_compare_clocks",
        ),
        Mutation(
            "a second block of a profile deletes the first one",
            "tools/profiling/profile.py",
            "        if self._run:\n",
            "        if False:\n",
            "tools/test_profile.py::"
            "test_a_second_block_of_one_profile_is_refused_and_the_first_stays",
        ),
        Mutation(
            "each group of ranks has the whole network of a host",
            "tools/explain.py",
            "leaving[host] += num_bytes",
            "leaving[host] = num_bytes",
            "tools/test_rates.py::test_the_hosts_are_those_of_the_devices_not_of_their_numbers",
        ),
        Mutation(
            "a loop for TPUs counts once",
            "tools/timeline.py",
            "count = self._derived(one, computation)",
            "count = 1",
            "tools/test_trip_counts.py::test_a_loop_runs_until_its_counter_reaches_the_bound",
        ),
    ],
    "jdp": [
        Mutation(
            "stage=True is stage 1",
            "validation.py",
            "        if isinstance(value, bool):\n            raise TypeError\n",
            "",
            "test_validation.py::test_what_is_not_an_integer_is_refused",
        ),
        Mutation(
            "a command whose output is closed ends in a traceback",
            "__main__.py",
            '    print(end="", flush=True)  # raises',
            "    sys.stdout.flush()  # raises",
            "test_cli.py::test_a_command_whose_output_is_closed_ends_without_a_traceback",
        ),
        Mutation(
            "a step of functools.partial has no name",
            "step_spec.py",
            'getattr(self.fn, "__name__", "step")',
            "self.fn.__name__",
            "training/test_step.py::test_a_step_may_be_a_partial_function",
        ),
        Mutation(
            "a donated state is not named",
            "pytrees.py",
            "    if not any_deleted(tree):\n        return\n",
            "    return\n",
            "checkpoint/test_checkpointer.py::"
            "test_a_donated_state_is_refused_at_once_and_does_not_count",
        ),
        Mutation(
            "a rule of per_rank changes the commit that it reads",
            "rank_state.py",
            "wrap(np.array(saved))",
            "wrap(saved)",
            "checkpoint/test_checkpointer.py::"
            "test_a_rule_for_another_number_of_ranks_may_change_and_keep_what_was_saved",
        ),
    ],
    "csrc": [
        Mutation(
            "a process makes a CUDA context on GPU 0 too",
            "csrc/cuda/cuda_check.h",
            "is_before_used = has_context();",
            "is_before_used = true;",
            "csrc/test_cuda_model.py::"
            "test_a_process_makes_no_context_on_a_gpu_that_it_does_not_drive",
        ),
        Mutation(
            "a step that ended with an error keeps its room",
            "csrc/cuda/start_finish.cc",
            "    if (flight.in_flight) regions_.free(flight.region);\n",
            "",
            "csrc/test_cuda_model.py::"
            "test_work_of_a_communicator_is_ordered_and_a_failed_call_leaves_nothing_behind",
        ),
        Mutation(
            "a ring begins before its gradients are computed",
            "csrc/cuda/start_finish.cc",
            "  JDP_RETURN_IF_ERROR(order(stream, stream_));\n"
            "  JDP_RETURN_IF_ERROR(reduce(*flight, leaves,",
            "  JDP_RETURN_IF_ERROR(reduce(*flight, leaves,",
            "csrc/test_cuda_model.py::"
            "test_work_of_a_communicator_is_ordered_and_a_failed_call_leaves_nothing_behind",
        ),
        Mutation(
            "sums between processes are written where others still read",
            "csrc/cpu/segment_call.h",
            "slot(rank, round).result)",
            "slot(rank, round).data)",
            "collectives/test_several_processes.py::"
            "test_every_rank_gets_exact_means_of_models_of_odd_sizes",
        ),
        Mutation(
            "float16 gradients below 6.1e-5 become 0",
            "csrc/common/element.h",
            "const float value = float_of(bits) - float_of(subnormal & 113u << 23);",
            "const float value = subnormal ? 0.0f : float_of(bits);",
            "collectives/test_several_processes.py::"
            "test_float16_gradients_below_the_smallest_normal_number_move_parameters",
        ),
    ],
}
