"""All patches, in the order in which they are applied."""

from __future__ import annotations

import functools

from treefx.torch_patches import backports, batch_symbols, dynamo, libraries, substitution, symbols
from treefx.torch_patches.patch import Patch

__all__ = ["PATCHES", "apply_patches"]

_OLDER, _ALL = "torch < 2.13", "all"

PATCHES = (
    Patch(
        "torch._dynamo.variables.functions.invoke_and_store_as_constant",
        _OLDER,
        "a function whose result is constant cannot be handed a module: hooks for hidden states cut the graph",
        "tests/backend/test_losses.py::test_hidden_states_of_every_layer",
        backports.take_objects_for_constants,
    ),
    Patch(
        "torch._dynamo.variables.functions.UserMethodVariable.call_function",
        _OLDER,
        "an autograd function that a module keeps as a method cuts the graph",
        "tests/trainers/test_liger.py::test_llama",
        backports.apply_functions_kept_by_modules,
    ),
    Patch(
        "torch._inductor.codegen.cpp.CppVecKernel.indirect_assert",
        _OLDER,
        "a checked index under a condition that all lanes share is no C++",
        "tests/backend/life/test_process.py::test_what_is_looked_up_and_padded_compiles",
        backports.spread_conditions_of_indices,
    ),
    Patch(
        "torch._dynamo.variables.tensor.TensorVariable.method_requires_grad_",
        "all; torch < 2.13 also OutputGraph._validate_outputs_safe_for_autograd_nodes",
        "x.requires_grad_() on a tensor made in the graph (PEFT, frozen embeddings) cuts it behind the embedding",
        "tests/backend/life/test_autograd.py::test_gradients_of_embeddings_that_are_kept",
        dynamo.pass_requires_grad,
    ),
    Patch(
        "torch._dynamo.variables.builtin.BuiltinVariable._handle_insert_op_in_graph",
        _ALL,
        "a layer that is dropped at a rate of zero cuts the graph (opt, xglm)",
        "tests/backend/test_randomness.py::test_a_rate_of_zero_drops_nothing",
        dynamo.drop_no_layer_at_a_rate_of_zero,
    ),
    Patch(
        "torch._dynamo.variables.builtin.BuiltinVariable._handle_insert_op_in_graph (x[mask])",
        _ALL,
        "a check that counts the elements under a mask cuts the graph between embeddings and layers (gemma4)",
        "tests/torch_patches/test_dynamo.py::test_a_check_of_selected_elements_cuts_nothing",
        dynamo.count_checked_elements,
    ),
    Patch(
        "torch._dynamo.variables.misc.GetAttrVariable.call_method",
        _ALL,
        "a layer that reads the module of its weight's class cuts the graph (DoRA of PEFT)",
        "tests/torch_patches/test_dynamo.py::test_the_module_of_a_class_is_a_text",
        dynamo.name_modules_of_classes,
    ),
    Patch(
        "transformers::grouped_mm_fallback (its autograd)",
        "transformers <= 5.17",
        "the backward of experts loops over values, which no graph of a backward knows",
        "tests/backend/models/test_experts.py::test_load_balancing_loss",
        libraries.keep_backward_of_experts_whole,
    ),
    Patch(
        "torch._dynamo.config.ignore_logging_functions",
        _ALL,
        "logger.warning_once cuts the graph between logits and loss (gpt2)",
        "tests/torch_patches/test_dynamo.py::test_a_warning_between_logits_and_loss_cuts_nothing",
        dynamo.pass_warnings,
    ),
    Patch(
        "torch._dynamo.utils._get_dynamo_config_for_logging",
        "torch 2.11",
        "functions among the settings cannot be written as JSON: a traceback is printed for every graph",
        "tests/backend/life/test_process.py::test_settings_that_cannot_be_written_are_left_out",
        dynamo.log_without_settings,
    ),
    Patch(
        "transformers.utils.output_capturing.maybe_install_capturing_hooks",
        _ALL,
        "the lock around its hooks cuts the first graph for good, head and loss on the far side",
        "tests/backend/models/test_experts.py::test_load_balancing_loss",
        libraries.install_hooks_first,
    ),
    Patch(
        "torch._dynamo.variables.builder._automatic_dynamic",
        _ALL,
        "other lengths compile a second graph, other numbers of rows a third, and a forest's columns are a number",
        "tests/torch_patches/test_dynamo.py::test_another_number_of_rows_compiles_nothing",
        batch_symbols.take_batches_as_symbols,
    ),
    Patch(
        "torch._dynamo.symbolic_convert.InstructionTranslator.run",
        _ALL,
        "a model that computes with sizes in floats (InternVL) is an internal error where these are symbols",
        "tests/torch_patches/test_batch_symbols.py::test_an_internal_error_is_traced_again",
        batch_symbols.trace_again_without_symbols,
    ),
    Patch(
        "torch._dynamo.variables.builder.VariableBuilder.__call__",
        "all; also torch._dynamo.guards.GuardBuilder.TENSOR_MATCH",
        "hidden states between graphs are no plain tensor: the graph behind them runs on rows, padding included",
        "tests/backend/calls/test_cut_graphs.py::test_all_graphs_share",
        dynamo.take_rows_between_for_plain,
    ),
    Patch(
        "torch._dynamo.backends.distributed.DDPOptimizer.__init__",
        _ALL,
        "DDP's buckets cut a compiled model, and all graphs but the first get no token ids",
        "tests/trainers/test_distributed.py::test_ranks_match_one_uncompiled_process",
        dynamo.leave_buckets_whole,
    ),
    Patch(
        "torch._dynamo.variables.functions.UserFunctionVariable.call_function",
        _ALL,
        "flash attention of transformers, and what models call themselves, cuts the graph in every layer",
        "tests/backend/calls/test_flash.py::test_lengths_compile_twice_at_most",
        substitution.wrap_called,
    ),
    Patch(
        "torch._dynamo.variables.misc.AutogradFunctionVariable.call_apply",
        _ALL,
        "Liger's kernels would run on rows, and TRL's head without logits cuts the graph",
        "tests/trainers/test_liger.py::test_in_float64",
        substitution.wrap_applied,
    ),
    Patch(
        "torch.fx.experimental.proxy_tensor._build_proxy_for_sym_expr",
        _ALL,
        "a product of three sizes loses a factor",
        "tests/backend/life/test_rows_of_batches.py::test_products_of_sizes",
        symbols.write_products_whole,
    ),
    Patch(
        "torch.compiler._is_compiling_flag",
        _ALL,
        "threads that call compiled functions while another one compiles are taken for parts of its trace",
        "tests/backend/life/test_threads.py::test_a_warm_model_runs_in_the_middle_of_a_trace",
        None,
    ),
    Patch(
        "torch.autograd.Function.apply",
        _ALL,
        "an autograd function in code that Dynamo leaves unread loses its backward (allow_in_graph, torchao's Float8)",
        "tests/backend/general/test_unread_code.py::test_a_linear_backward_runs_once_per_token",
        None,
    ),
)
"""Two symbols are settings: a logging function is added, and the flag is set while treefx compiles.

``Function.apply`` is another method while treefx traces such code."""


@functools.cache
def apply_patches() -> None:
    """Apply all of them, once per process."""
    for patch in PATCHES:
        if patch.apply is not None:
            patch.apply()
