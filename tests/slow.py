"""Cases that ``make test`` leaves to ``make test-slow``: 20 of 6,000 take a sixth of all seconds.

A choice by hand, the same every time: benches in processes of their own, figures of compiled kernels that other cases
of their test hold for other heads, second processes, the longest of several cases of one law.
"""

SLOW = (
    "tests/backend/calls/test_flash.py::test_other_backends_see_the_original",
    "tests/backend/life/test_packed_lengths.py::test_rows_of_any_number",
    "tests/backend/life/test_packed_lengths.py::test_twelve_lengths_compile_twice_at_most",
    "tests/backend/life/test_process.py::test_one_compilation_on_inductor_and_a_warm_second_process",
    "tests/backend/life/test_remembered.py::test_calls_in_any_order[2-aot_eager]",
    "tests/backend/models/test_zoo.py::test_architecture_in_batches_of_all_shapes",
    "tests/backend/models/test_zoo.py::test_what_a_sum_that_cancels_has_lost_is_found",
    "tests/bench/test_apart.py::test_processes_take_turns",
    "tests/bench/test_bench_first_step.py::test_a_way_in_two_processes",
    "tests/bench/test_bench_large.py::test_three_ways",
    "tests/bench/test_bench_overlap.py::test_records_of_a_small_block",
    "tests/bench/test_bench_trl.py::test_a_run_in_processes_of_its_own",
    "tests/kernels/gpu/gluon/test_gluon.py::test_compiled_within_bounds[Case(dtype=torch.float16",
    "tests/kernels/gpu/gluon/test_gluon_backward.py::test_what_a_logit_takes",
    "tests/kernels/gpu/test_triton_ahead_of_time.py::test_command_prints_records",
    "tests/kernels/gpu/test_triton_ahead_of_time.py::test_hopper_wide_and_uneven_heads",
    "tests/kernels/gpu/test_triton_ahead_of_time.py::test_plain_loops_load_ahead",
    "tests/passes/regions/test_second_process.py::test_a_second_process_loads_layers",
    "tests/planning/test_execute_convolution.py::test_lfm2",
    "tests/scale/test_launchers.py::test_accelerate_starts_the_example",
)
"""How their names begin."""
