"""What trainers feed, and which tests hold it: loss and every gradient as in eager mode, tokens as in the trie."""

from importlib import import_module

import pytest

ROWS, TRAPS, FLASH, DIRECT = (
    f"backend.calls.test_{name}" for name in ("packed_rows", "packed_traps", "flash", "direct_flash")
)
LENGTHS, PACKED, PADDED, STEPS = (
    "backend.life.test_packed_lengths", *(f"trainers.feeds.test_{name}" for name in ("packed", "padded", "steps"))
)  # fmt: skip
TRL, GROUPS, LIGER = (f"trainers.test_{name}" for name in ("trl", "trl_groups", "liger"))

FORMS: dict[str, dict[str, str]] = {
    # Packed rows: one row [1, sum T], positions that restart, no mask
    "logits changed in place and picked by rolled ids (verl, SkyRL, OpenRLHF, open-instruct)": {
        ROWS: "test_the_loss_outside test_labels_inside test_the_call_equals_its_sequences_run_on_their_own",
        PACKED: "test_in_float32",
        LENGTHS: "test_lengths_with_the_loss_outside test_random_packings",
    },
    "pads behind that are one more sequence (verl, pad_to_length)": {
        ROWS: "test_trailing_pads", PACKED: "test_in_float32", LENGTHS: "test_twelve_lengths_compile_twice_at_most",
    },
    "pads behind, of position 0 each (NeMo-RL; TRL with pad_to_multiple_of)": {
        ROWS: "test_trailing_pads", PACKED: "test_in_float32", LENGTHS: "test_twelve_lengths_compile_twice_at_most",
    },
    "lengths whose last one counts pads of positions that restart (prime-rl)": {
        PACKED: "test_lengths_join_what_positions_part test_cut_by_positions_they_would_be_wrong",
        FLASH: "test_ends_go_before_positions",
        TRAPS: "test_lengths_for_flash_attention_do_not_matter_to_sdpa",
    },
    "a dictionary of no masks with the ends (AReaL)": {
        PACKED: "test_no_masks_by_name_leave_the_ends_to_flash_attention",
        TRAPS: "test_no_mask_by_name_is_one_causal_sequence",
    },
    "ends, the longest and numbers of sequences (transformers' collator of flattened rows)": {
        PACKED: "test_flattened_rows_of_twelve_lengths", STEPS: "test_packed_rows_with_the_lengths_for_flash_attention_"
        "and_numbers_of_sequences", FLASH: "test_packed_rows_by_their_ends test_lengths_compile_twice_at_most",
    },
    "several packed rows (ms-swift, axolotl)": {
        ROWS: "test_several_packed_rows_share_across_rows_and_segments", LENGTHS: "test_rows_of_any_number",
        FLASH: "test_several_packed_rows_see_across_segments test_segments_in_several_rows_would_be_wrong",
    },
    "a mask of four dimensions as an input (LLaMA-Factory, neat_packing)": {
        TRAPS: "test_documents_of_a_given_mask test_a_given_mask_whose_documents_overlap "
        "test_sharing_documents_that_overlap_would_be_wrong",
        PACKED: "test_a_given_mask_in_float32", LENGTHS: "test_given_masks_of_all_lengths",
    },
    "a mask of the numbers of sequences, which sdpa reads as plain (axolotl)": {
        TRAPS: "test_a_mask_of_numbers_is_read_as_a_plain_one",
    },
    "windows, caps and sinks": {
        ROWS: "test_labels_inside test_experts", FLASH: "test_packed_rows_by_positions test_packed_rows_by_their_ends "
        "test_what_a_kernel_is_asked_for_may_not_be_ignored", DIRECT: "test_packed_rows",
        TRAPS: "test_columns_for_depth_in_a_window_would_be_wrong test_a_model_that_keeps_positions_from_its_mask",
    },
    "tokens of one dimension, ends handed to every block (torchtitan)": {
        PACKED: "test_tokens_of_one_dimension test_blocks_compiled_one_by_one_run_as_they_are",
        STEPS: "test_rows_without_a_dimension_run_as_they_are",
    },
    "positions of three or four planes (models of pictures; verl)": {
        PACKED: "test_four_planes",
        STEPS: "test_positions_of_several_planes",
    },
    # Padded rows
    "groups of samples in micro-batches, prompts padded left (TRL GRPO, RLOO)": {
        STEPS: "test_grpo", PADDED: "test_groups_in_order_share_their_prompts_and_scattered_ones_less",
        TRL: "test_trl_trainer_matches_the_uncompiled_run",
    },
    "pairs, with a reference that is the model without its adapter (TRL DPO)": {
        STEPS: "test_dpo", PADDED: "test_a_reference_without_the_adapter",
    },
    "a head without logits in place of forward (TRL SFT)": {PADDED: "test_a_forward_in_place_of_the_models"},
    "Liger's functions, the backbone called by itself": {
        LIGER: "test_llama test_in_float64", PADDED: "test_a_backbone_that_is_called_by_itself "
        "test_the_model_around_it_is_compiled_for_nothing_and_says_so",
    },
    "pairs of columns in eights, logits in float32 (LLaMA-Factory DPO)": {
        PADDED: "test_preferences_of_columns_in_eights_and_logits_in_float32",
    },
    "FlashAttention over padding on either side, and a mask of ones": {
        PADDED: "test_flash_attention_of_padded_rows", FLASH: "test_padded_rows test_garbage_at_pads_would_be_wrong",
    },
    "a step's rows in another order": {
        GROUPS: "test_groups_meet_and_the_step_stays_what_it_was "
        "test_every_step_trains_on_the_rows_that_trl_drew_for_it",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_its_tests(form: str) -> None:
    for module, names in FORMS[form].items():
        if module in (TRL, GROUPS):
            pytest.importorskip("trl")
        missing = [
            name for name in names.split() if not callable(getattr(import_module(f"tests.{module}"), name, None))
        ]
        assert not missing, f"tests.{module} was expected to hold {missing}"
