"""The trainer's side on the simulated device: what is right there, and that each bug of a list is found by one of these.

Every case runs in a process of its own (device_cases.py): some hang the device or fault it, some change what is ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import forked

HERE = Path(__file__).resolve().parent

# These leave the device as they found it: in one process.
TOGETHER = (
    "a_model_on_the_second_device_starts_nothing_on_the_first",
    "a_copy_is_the_state_at_the_call_whatever_comes_behind_it",
    "work_before_the_call_is_in_the_copy",
    "what_is_freed_while_it_is_copied_is_copied",
    "small_neighbours_go_in_few_copies",
    "a_full_device_has_no_memory_for_blocks",
    "every_bit_of_every_type_is_copied_in_a_block",
    "conjugates_and_negatives_are_copied_as_what_they_stand_for",
    "conjugates_go_through_buffers_as_what_they_stand_for",
    "two_threads_never_fill_one_block",
    "proofs_and_blocks_together_take_no_memory_to_speak_of",
    "what_was_queued_before_an_error_is_waited_for",
    "a_copy_that_is_interrupted_at_any_line_is_waited_for",
    "the_call_does_not_wait_for_a_copy",
    "a_slot_that_is_registered_already_fails_softly",
    "what_no_driver_registers_goes_through_buffers",
    "a_copy_through_buffers_leaves_a_device_that_hangs",
    "copies_go_in_the_waits_of_a_pipeline",
    "moments_are_those_of_the_device",
    "a_proof_takes_no_memory_of_the_device_to_speak_of",
    "what_is_not_in_order_is_copied_in_blocks",
    "a_full_device_puts_nothing_in_order",
    "a_rank_goes_on_with_its_sequence_on_another_device",
    "a_restore_waits_for_what_is_queued_for_its_tensors",
    "a_buffer_is_used_again_when_the_device_has_read_it",
    "every_device_of_a_process_goes_on_with_its_sequence",
    "what_is_queued_behind_a_hung_collective_is_void",
    "spots_are_those_at_the_call_on_every_device",
)
# In a process each; True: slow.
ALONE = {
    "memory_that_is_not_registered_gets_the_right_bytes": False,
    "a_state_comes_back_bit_for_bit_with_late_copies": True,
    "gradients_that_live_come_back_on_their_device": True,
    "what_lives_comes_back_on_another_device_of_its_node": False,
    "gradients_of_offloaded_shards_come_back_to_host_memory": False,
    "a_script_whose_default_device_is_the_accelerator_comes_back": True,
    "host_memory_that_a_device_still_writes_is_saved_as_it_will_be": True,
    "a_note_has_what_a_device_writes_to_host_memory": False,
    "state_on_the_host_of_parameters_on_a_device_comes_back_there": True,
    "an_optimizer_on_a_stream_of_its_own_comes_behind_the_copy": False,
    "what_is_settled_may_be_written_on_any_stream": True,
    "weights_that_are_written_beside_a_copy_give_the_version_up": True,
    "weights_that_are_written_past_torchs_counts_give_the_version_up": False,
    "a_weight_or_all_of_another_stream_that_are_written_past_torchs_counts_give_the_version_up": True,
    "an_optimizers_state_that_is_written_past_torchs_counts_gives_the_version_up": True,
    "what_is_copied_in_the_call_is_looked_at_too": True,
    "weights_are_looked_at_in_the_waits_of_a_pipeline": True,
    "a_full_device_holds_its_streams_until_all_is_copied": True,
    "values_that_grow_leave_room_for_spots": True,
    "a_device_far_behind_its_host_gives_no_version_up": True,
    "a_save_is_not_given_up_for_want_of_a_slot_before_its_device_came_to_it": True,
    "a_host_ahead_of_its_device_is_not_held_up": False,
    "a_host_five_seconds_ahead_of_its_device_is_not_held_up": True,
    "saves_take_no_memory_of_the_device_to_speak_of": True,
    "what_a_script_replaces_is_kept_once_at_most": False,
    "a_tensor_that_cannot_be_compared_keeps_no_other_from_being_proven": True,
    "what_the_host_copies_after_the_job_broke_off_is_void": False,
    "a_device_that_hangs_is_waited_for_no_longer_than_the_bounds": True,
    "a_step_behind_a_hung_collective_is_not_live": False,
    "a_step_that_the_device_finished_is_live": False,
    "gradients_that_live_on_a_device_leave_the_step_before_live": False,
    "a_device_that_works_is_told_from_one_that_does_not": False,
    "a_device_that_fails_a_restore_is_named_with_a_remedy": False,
    "a_faulted_device_gives_versions_up_and_raises_nothing_of_ours": True,
    "a_device_that_is_used_behind_its_restore_goes_on_with_its_sequence": True,
    "a_step_in_a_graph_is_captured_and_never_copied_late": False,
    "a_restore_queues_its_chunks_and_is_proven": False,
    "what_is_read_from_storage_goes_straight_to_the_device": True,
}

# What is taken out, the case that finds it, and what that says.
BUGS = {
    "streams_are_not_held": ("a_copy_is_the_state_at_the_call_whatever_comes_behind_it", "torn"),
    "the_side_stream_does_not_wait_for_what_is_queued": ("work_before_the_call_is_in_the_copy", "before the step"),
    "a_block_is_filled_while_it_is_sent": ("small_neighbours_go_in_few_copies", "has other bytes"),
    "a_block_is_filled_by_value": ("every_bit_of_every_type_is_copied_in_a_block", "other bits"),
    "buffers_take_what_torch_works_out": ("conjugates_go_through_buffers_as_what_they_stand_for", "stands for"),
    "each_slot_keeps_its_tensors": ("what_a_script_replaces_is_kept_once_at_most", "former states"),
    "a_note_keeps_its_tensors": ("what_a_script_replaces_is_kept_once_at_most", "former states"),
    "threads_queue_at_once": ("two_threads_never_fill_one_block", "another thread's bytes"),
    "sources_are_not_held": ("what_is_freed_while_it_is_copied_is_copied", "another tensor's memory"),
    "slots_are_not_registered": ("the_call_does_not_wait_for_a_copy", "the call took"),
    "a_bounce_is_not_awaited": ("what_no_driver_registers_goes_through_buffers", "torn"),
    "no_device_is_made_the_current_one": ("a_model_on_the_second_device_starts_nothing_on_the_first", "a context was made"),
    "a_paced_copy_does_not_follow": ("copies_go_in_the_waits_of_a_pipeline", "torn"),
    "moments_are_those_of_the_host": ("moments_are_those_of_the_device", "AssertionError"),
    "a_device_is_given_no_time": ("a_device_far_behind_its_host_gives_no_version_up", "AssertionError"),
    "a_slot_is_given_away_while_a_device_writes_to_it": (
        "a_device_that_hangs_is_waited_for_no_longer_than_the_bounds", "may still write"
    ),
    "copies_are_not_late": ("a_host_ahead_of_its_device_is_not_held_up", "AssertionError"),
    "a_tensor_is_put_in_order_whole": ("what_is_not_in_order_is_copied_in_blocks", "MiB for a tensor of 48"),
    "host_copies_are_not_asked": ("what_the_host_copies_after_the_job_broke_off_is_void", "AssertionError"),
    "a_proof_takes_the_tensor_whole": ("a_proof_takes_no_memory_of_the_device_to_speak_of", "of a tensor of 64"),
    "nothing_is_void": ("what_is_queued_behind_a_hung_collective_is_void", "garbage is told as complete"),
    "what_a_device_passes_later_counts": ("a_step_behind_a_hung_collective_is_not_live", "NaN is offered"),
    "what_is_queued_later_counts": ("what_is_queued_behind_a_hung_collective_is_void", "ran on after the abort"),
    "nobody_asks_the_device": ("a_device_that_works_is_told_from_one_that_does_not", "AssertionError"),
    "generators_are_saved_by_the_number_of_their_device": (
        "a_rank_goes_on_with_its_sequence_on_another_device", "AssertionError"
    ),
    "one_device_of_a_process_is_saved": ("every_device_of_a_process_goes_on_with_its_sequence", "drawn anew"),
    "devices_have_their_numbers": ("what_lives_comes_back_on_another_device_of_its_node", "device='sim:0'"),
    "gradients_go_where_they_were": ("what_lives_comes_back_on_another_device_of_its_node", "assign a gradient"),
    "gradients_are_noted_wherever_they_are": (
        "gradients_that_live_on_a_device_leave_the_step_before_live", "lies on a device"
    ),
    "devices_draw_nothing": ("a_device_that_is_used_behind_its_restore_goes_on_with_its_sequence", "drawn anew"),
    "nobody_looks_for_graphs": ("a_step_in_a_graph_is_captured_and_never_copied_late", "AssertionError"),
    "a_restore_comes_from_ordinary_memory": ("a_restore_queues_its_chunks_and_is_proven", "AssertionError"),
    "no_slot_is_known_to_the_driver": ("a_slot_that_the_driver_knows_needs_no_buffer", "a buffer of"),
    "nobody_waits_for_what_is_sent_in_place": ("a_slot_that_the_driver_knows_needs_no_buffer", "read before it was"),
    "a_restore_does_not_wait_for_the_stream": ("a_restore_waits_for_what_is_queued_for_its_tensors", "came after"),
    "only_the_first_step_comes_behind_a_copy": ("an_optimizer_on_a_stream_of_its_own_comes_behind_the_copy", "torn"),
    "a_copy_is_known_once_it_is_queued": ("a_copy_that_is_interrupted_at_any_line_is_waited_for", "is given away at"),
    "nobody_counts_writes": ("weights_that_are_written_beside_a_copy_give_the_version_up", "AssertionError"),
    "nobody_looks_at_devices": ("weights_that_are_written_past_torchs_counts_give_the_version_up", "torn"),
    "only_late_copies_are_looked_at": ("what_is_copied_in_the_call_is_looked_at_too", "torn"),
    "values_may_fill_a_slot": ("values_that_grow_leave_room_for_spots", "no room for them"),
    "spots_are_taken_beside_what_is_queued": ("spots_are_those_at_the_call_on_every_device", "other spots"),
    "a_settled_copy_is_awaited_by_streams_alone": ("what_is_settled_may_be_written_on_any_stream", "torn"),
    "nobody_waits_for_pinned_memory": (
        "host_memory_that_a_device_still_writes_is_saved_as_it_will_be", "of another step"
    ),
    "notes_do_not_wait_for_pinned_memory": ("a_note_has_what_a_device_writes_to_host_memory", "of another step"),
    "a_buffer_is_used_again_at_once": ("a_buffer_is_used_again_when_the_device_has_read_it", "overwritten"),
}  # fmt: skip
GRAPHED = "a_step_in_a_graph_is_captured_and_never_copied_late"
# Found within a second or two each; the others are slow.
QUICK = {"streams_are_not_held", "nothing_is_void", "what_a_device_passes_later_counts", "sources_are_not_held"}

pytestmark = pytest.mark.device


def tried(path: Path, *words: str, **environ: str) -> tuple[int, str]:
    """The exit code and the words of a case."""
    if GRAPHED in words and not hasattr(torch.accelerator, "Graph"):
        pytest.skip("this PyTorch has no torch.accelerator.Graph")
    log = path / "log"
    environment = os.environ | {"CASE_DIRECTORY": str(path / "checkpoints")} | environ
    with log.open("w") as file:
        worker = forked.Popen(
            [sys.executable, str(HERE / "device_cases.py"), *words], env=environment, stdout=file, stderr=file
        )
        code = worker.wait(110)
    return code, log.read_text()


def test_cases_that_leave_the_device_as_it_was(tmp_path: Path, runtime_dir: Path) -> None:
    code, log = tried(tmp_path, ",".join(TOGETHER))
    assert code == 0, log[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [",".join(TOGETHER), *ALONE])
def test_a_device_named_as_a_vendors_goes_the_same_way(name: str, tmp_path: Path, runtime_dir: Path) -> None:
    """Our calls, not the vendor's: torch lets nobody take the name of a device that it knows itself, as xpu."""
    code, log = tried(tmp_path, name, SIMULATED_DEVICE_NAME="npu")
    assert code == 0, log[-4000:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * slow) for n, slow in ALONE.items()])
def test_case(name: str, tmp_path: Path, runtime_dir: Path) -> None:
    code, log = tried(tmp_path, name)
    assert code == 0, log[-4000:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in BUGS])
def test_bug_is_found(name: str, tmp_path: Path, runtime_dir: Path) -> None:
    case, said = BUGS[name]
    code, log = tried(tmp_path, case, name)
    assert code == 1, f"{case} does not miss it"
    assert said in log, log[-4000:]
