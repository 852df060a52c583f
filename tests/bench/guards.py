"""Proof that the tests which SECURITY.md and docs/faults.md name can fail: each guard taken out, its tests run.

By hand: python tests/bench/guards.py [words, of which a test's id or a change must contain one]

A mutation changes the package in a copy of this tree; each of its tests, run alone there, must then fail by an
assertion, not as it is set up. Prints a line for each, and a summary; exit code 1 if a test passes without its guard.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("unet3d", "configs", "tests", "docs", "train.py", "pyproject.toml", "README.md", "CONTRIBUTING.md")
COPIED += ("SECURITY.md", "data/README.md")
PATIENCE, HANGING = 120, 60  # seconds for a test; for one whose guard is against a hang
LARGEST = 2**34  # bytes of data: a test of a guard against taking memory must not take the machine's

Change = tuple[str, str, str]  # a file in unet3d/, text that it holds exactly once, the text instead


class Mutation(NamedTuple):
    """Takes a guard out, or breaks what a test shows; `tests` are ids below tests/."""

    changes: Sequence[Change]
    tests: Sequence[str]
    hangs: bool = False  # without the guard the test would not end


# Changes that several mutations share.
IN_PLACE = (  # files written where they are, not beside and then moved
    ("files.py", 'temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")', "temporary = path"),
    ("files.py", 'temporary.open("x+b")', 'temporary.open("w+b")'),
    ("files.py", "os.replace(path, previous)", "pass"),
)
ANY_KEY = ("compose.py", 'if added := flat(values, ".").keys() - ABOUT.keys():', "if added := set[str]():")

# fmt: off
RESUME = (
    Mutation([("run/resume.py", "torch.set_rng_state(on_cpu)", "pass")],
        ["test_faults_resume.py::test_killed_twice_a_run_ends_as_if_it_were_not"]),
    Mutation([("data/loader.py", "first_step * config.accumulate", "0")],
        ["test_faults_resume.py::test_killed_twice_a_run_ends_as_if_it_were_not"]),
    # a lock that lives on in the workers of a killed run
    Mutation([("cli/lifecycle.py", "fcntl.lockf(file", "fcntl.flock(file")],
        ["test_faults_resume.py::test_killed_twice_a_run_ends_as_if_it_were_not"]),
    Mutation([("data/patches.py", "default_rng([self.seed, index.micro_batch, index.slot])", "default_rng()")],
        ["test_faults_resume.py::test_one_seed_is_one_run_whatever_the_workers_and_checkpointing",
         "data/test_loader.py::test_the_same_stream_for_any_number_of_workers"]),
    Mutation([("train/policy.py", "use_reentrant=False)", "use_reentrant=False, preserve_rng_state=False)")],
        ["test_faults_resume.py::test_one_seed_is_one_run_whatever_the_workers_and_checkpointing",
         "train/test_policy.py::test_checkpointing_changes_no_bit"]),
    # a part of a snapshot that does not matter
    Mutation([("run/resume.py", 'self.scaler.load_state_dict(state["scaler"])', "pass")],
        ["test_faults_resume.py::test_each_part_of_a_snapshot_matters"]),
    Mutation([("report/run_folder.py", '(at == step and (step == validated or "train/loss" in record))', "at == step")],
        ["test_faults_resume.py::test_killed_beside_a_save_no_validation_is_lost_or_recorded_twice",
         "test_faults_resume.py::test_records_of_a_repeated_validation_are_dropped"]),
    Mutation([("run/run.py", "if is_last or self.checkpoints.saved is None:", "if self.checkpoints.saved is None:")],
        ["test_faults_run.py::test_a_run_killed_in_its_last_validation_has_lost_no_step",
         "test_predictions.py::test_a_run_ended_within_its_last_validation_makes_all_of_it_again"]),
    Mutation([("run/run.py", "self.first >= config.steps and ranks.on_first(lambda: run_folder.is_done(folder))",
          "self.first >= config.steps")],
        ["test_faults_resume.py::test_a_run_killed_after_its_last_step_is_finished"]),
    # half a picture counts as one
    Mutation([("report/plots.py", "with replacing(path.with_suffix(suffix)) as file:",
          'with path.with_suffix(suffix).open("wb") as file:')],
        ["test_predictions.py::test_a_run_killed_in_its_picture_draws_from_its_label_maps"]),
    Mutation([("run/run.py", "self.checkpoints.save_last()\n            self._keep_measured_early()",
          "self._keep_measured_early()")],
        ["test_faults_run.py::test_a_signal_ends_the_run_where_it_is_and_the_run_goes_on_from_there"]),
    Mutation([("signals.py", "if self._raises:", "if False:")],
        ["test_faults_run.py::test_before_the_first_step_there_is_nothing_to_wait_for"]),
    Mutation([("signals.py", "if self._interrupted:", "if False:")],
        ["test_faults_run.py::test_a_second_interrupt_ends_the_run_at_once"]),
    # torch ends the workers only when nothing refers to them
    Mutation([("data/loader.py", "stream: Any = iter(loader)", 'stream = globals()["kept"] = iter(loader)'),
         ("data/loader.py", "stream._shutdown_workers()", "pass"),
         ("data/loader.py", "for worker in workers:", "for worker in ():")],
        ["test_faults_run.py::test_neither_data_workers_nor_wandbs_process_outlive_the_run"], hangs=True),
    Mutation([("data/loader.py", "worker.kill()", "worker.terminate()")],
        ["test_faults_run.py::test_a_worker_that_hangs_ends_with_the_run"], hangs=True),
    Mutation([("data/loader.py", "signals.ignore()", "pass")],
        ["test_faults_run.py::test_workers_leave_signals_to_the_run"]),
    Mutation([("compose.py", "if name.startswith(FIXED) and name not in FREE]", "if False]")],
        ["test_cli.py::test_resume_refuses_another_network",
         "test_faults_resume.py::test_another_network_is_refused_and_another_rate_is_reported",
         "test_command_line.py::test_what_would_make_it_another_run_is_refused_however_it_is_written"]),
    Mutation([("run/resume.py", "others[kind].append(name)", "pass")],
        ["test_faults_resume.py::test_labels_that_were_swapped_are_another_run",
         "data/test_check.py::test_a_resumed_run_refuses_images_and_labels_that_changed"]),
    Mutation([("run/resume.py", 'if name != "files" and before[name] != now[name]]', "if False]")],
        ["test_faults_resume.py::test_other_cases_are_another_run"]),
    Mutation([("run/resume.py", 'of = "full" if then["full"] and found["full"] else "sample"', 'of = "sample"')],
        ["data/test_check.py::test_bytes_between_the_sampled_ones_are_compared_on_request"]),
    Mutation([("data/check.py", "max(size - BLOCK, 0)", "max(size - 2 * BLOCK, 0)")],
        ["data/test_check.py::test_both_ends_of_a_large_file_are_always_compared"]),
    Mutation([("run/run.py", "if not self.is_done and ranks.RANK == 0:", "if True:")],
        ["test_faults_resume.py::test_a_run_that_is_done_is_left_as_it_is"]),
    Mutation([("cli/lifecycle.py", "left_nothing = text == RUNNING or", "left_nothing = False and")],
        ["test_faults_resume.py::test_a_run_killed_before_its_first_snapshot_starts_over",
         "test_faults_resume.py::test_a_job_that_may_have_begun_begins_or_goes_on"]),
    Mutation([("cli/lifecycle.py", "left_nothing = text == RUNNING or", "left_nothing = True or")],
        ["test_faults_resume.py::test_a_run_with_a_result_or_perhaps_alive_is_left_alone"]),
    Mutation([("cli/train.py", "if lifecycle.snapshots(place):", "if False:")],
        ["test_command_line.py::test_a_job_that_may_have_begun_goes_on_or_begins"]),
    Mutation([("cli/lifecycle.py", "if error.errno in (errno.EACCES, errno.EAGAIN):", "if False:")],
        ["test_faults_run.py::test_a_folder_in_use_is_refused_and_its_run_unharmed"]),
    Mutation([("compose.py", "lambda: secrets.token_hex(3)", 'lambda: "one"')],
        ["test_faults_run.py::test_two_runs_of_one_second_have_two_folders"]),
    Mutation([("train/policy.py", "if self.has_run else {}", "if False else {}")],
        ["train/test_policy.py::test_checkpointing_changes_no_bit",
         "train/test_policy.py::test_only_copies_of_running_statistics_see_a_batch_twice"]),
)

SNAPSHOTS = (
    Mutation(IN_PLACE,
        ["train/test_faults_snapshot.py::test_a_kill_at_any_moment_leaves_a_whole_snapshot",
         "train/test_faults_snapshot.py::test_a_kill_between_any_two_parts_of_a_save_leaves_a_whole_snapshot"]),
    # nothing makes sure that the content is on the disk before the name is
    Mutation([("files.py", "os.fsync(file.fileno())", "pass")],
        ["train/test_faults_snapshot.py::test_a_kill_between_any_two_parts_of_a_save_leaves_a_whole_snapshot"]),
    Mutation([("train/checkpoint.py", "is_damage = isinstance(error,", "is_damage = False and isinstance(error,")],
        ["train/test_checkpoint.py::test_a_truncated_file_is_refused"]),
    Mutation([("train/checkpoint.py", "wrong.append(str(error))", "raise")],
        ["train/test_checkpoint.py::test_a_damaged_snapshot_is_replaced_by_the_previous_one",
         "test_faults_resume.py::test_a_damaged_snapshot_gives_way_to_the_one_before",
         "test_faults_resume.py::test_without_a_whole_snapshot_nothing_starts_over"]),
    Mutation([("run/resume.py", 'is_older = self.saved is not None and self.saved[0] < state["step"]',
          "is_older = True")],
        ["test_faults_resume.py::test_the_whole_snapshot_outlives_the_save_after_the_damaged_one"]),
    Mutation([("train/checkpoint.py", "if damaged := archive.testzip():", "if damaged := None:")],
        ["train/test_checkpoint.py::test_one_flipped_bit_is_refused_though_torch_would_load_it"]),
    Mutation([("train/checkpoint.py", "weights_only=True)", "weights_only=False)")],
        ["train/test_checkpoint.py::test_a_pickled_command_is_refused_and_not_run",
         "test_security.py::test_no_call_runs_or_unpacks_what_a_file_says"]),
    Mutation([("files.py", "yaml.safe_load(text)", "yaml.unsafe_load(text)")],
        ["test_security.py::test_no_call_runs_or_unpacks_what_a_file_says"]),
    Mutation([("train/checkpoint.py", "except Exception as error:", "except OSError as error:")],
        ["test_security.py::test_a_damaged_pickle_is_one_line"]),
    Mutation([("train/checkpoint.py", "if path.exists() and not path.is_file():", "if False:")],
        ["train/test_checkpoint.py::test_a_missing_file_and_a_folder_are_refused"]),
    Mutation([("train/checkpoint.py", "except (OSError, RuntimeError) as error:", "except KeyError as error:")],
        ["train/test_faults_snapshot.py::test_a_place_that_cannot_be_written_to_is_one_line"]),
    Mutation([("cli/train.py", "refuse_unwritable(words)\n            planned", "planned")],
        ["train/test_faults_snapshot.py::test_a_run_folder_that_cannot_be_made_is_one_line"]),
    Mutation([("train/checkpoint.py", "if found != FORMAT:", "if False:")],
        ["train/test_checkpoint.py::test_another_format_or_a_strangers_file_is_refused_but_not_called_damaged",
         "test_faults_resume.py::test_a_snapshot_that_does_not_fit_is_exit_3_and_no_other_is_taken"]),
    Mutation([("train/checkpoint.py", "    if rows:", "    if False:")],
        ["train/test_checkpoint.py::test_all_differences_are_counted_and_ten_are_shown"]),
    # its layers: only known options are typed, and only options are allowed
    Mutation([ANY_KEY,
         ("compose.py", "OmegaConf.merge(OmegaConf.structured(Config), values)",
          'OmegaConf.merge(OmegaConf.structured(Config, flags={"struct": False}), values)')],
        ["test_security.py::test_a_target_in_a_snapshot_is_never_instantiated"]),
    Mutation([("run/predict.py", "except (KeyError, TypeError, ValueError) as error:", "except KeyError as error:")],
        ["test_security.py::test_a_snapshot_of_wrong_types_is_one_line"]),
    Mutation([("run/resume.py", "self._refuse_unsound(state, path)", "pass")],
        ["test_checkpoints.py::test_a_state_that_no_run_has_written_is_refused"]),
    Mutation([("run/resume.py", "AttributeError, ValueError, RuntimeError) as error:", "AttributeError) as error:")],
        ["test_checkpoints.py::test_a_random_state_that_torch_refuses_is_one_line"]),
    Mutation([("run/resume.py", "self._groups(state)}",
          '[state["optimizer"]["param_groups"][0] | {"params": [*range(22)]}]}')],
        ["test_checkpoints.py::test_options_of_the_optimizer_come_from_the_config"]),
    Mutation([("train/checkpoint.py", "if not is_finite(value)), None):", "if False), None):")],
        ["test_security.py::test_weights_that_are_not_finite_do_not_predict"]),
)

DATA = (
    Mutation([("data/check.py", "            found.append(str(error))", "            raise")],
        ["data/test_check.py::test_all_problems_of_all_cases_are_listed_at_once",
         "data/test_check.py::test_check_data_and_a_run_list_every_problem_and_end_with_2"]),
    Mutation([("data/preprocess.py", "problems.append(str(error))", "raise")],
        ["data/test_check.py::test_a_run_lists_all_that_is_damaged_beneath_sound_headers"]),
    Mutation([("data/nifti.py", "READ_ERRORS = (OSError, EOFError, ValueError", "READ_ERRORS = (OSError, ValueError")],
        ["data/test_nifti.py::test_a_truncated_gz_is_refused",
         "test_fuzz.py::test_damage_is_refused_or_harmless"]),
    Mutation([("data/nifti.py", 'if path.name.endswith(".gz") and start != b"\\x1f\\x8b":', "if False:")],
        ["data/test_nifti.py::test_a_file_that_is_no_nifti_is_refused"]),
    # nibabel stops before the checksum
    Mutation([("data/nifti.py", '_inflated(path, image) if path.name.endswith(".gz") else image.dataobj',
          "image.dataobj")],
        ["data/test_nifti.py::test_a_flipped_byte_is_found_though_it_still_inflates"]),
    Mutation([("data/nifti.py", "if claimed > held:", "if False:")],
        ["data/test_nifti.py::test_a_small_packed_file_that_claims_much_is_refused_before_memory_is_taken",
         "data/test_nifti.py::test_a_bad_header_is_refused_with_case_and_path"]),
    Mutation([("data/nifti.py", "if not is_regular or not np.isfinite(affine).all():", "if False:")],
        ["data/test_nifti.py::test_a_bad_header_is_refused_with_case_and_path"]),
    Mutation([("data/nifti.py", "if not np.isfinite(zooms).all() or not zooms.all():", "if False:")],
        ["data/test_nifti.py::test_a_bad_header_is_refused_with_case_and_path"]),
    Mutation([("data/nifti.py", "stream.seek(voxels.offset)", "stream.read(voxels.offset)")],
        ["data/test_nifti.py::test_voxels_far_into_the_stream_take_no_memory_for_what_is_before_them"]),
    Mutation([("data/nifti.py", "stream.read(MAX_TRAILING + 1)) > MAX_TRAILING", "stream.read()) < 0")],
        ["data/test_nifti.py::test_a_stream_that_goes_on_behind_its_voxels_is_not_followed"]),
    Mutation([("data/nifti.py", "if offset > MAX_OFFSET:", "if False:")],
        ["data/test_nifti.py::test_voxels_that_begin_far_into_the_file_are_refused_unread"]),
    Mutation([("data/volume.py", "min(nifti.MAX_VOXELS, MAX_GROWTH * stored)", "nifti.MAX_VOXELS")],
        ["data/test_volume.py::test_a_grid_may_hold_32_times_the_voxels_that_are_stored"]),
    Mutation([("data/nifti.py", "return kind(ArrayProxy(path, header, mmap=False), affine, header)",
          "return nib.load(path)")],
        ["data/test_nifti.py::test_an_extension_is_skipped_unread",
         "data/test_nifti.py::test_a_cifti_file_is_read_as_what_its_nifti_header_says"]),
    Mutation([("data/nifti.py", "if bad and not rules.nonfinite:", "if False:")],
        ["data/test_preprocess.py::test_voxels_that_are_not_finite_are_an_error_or_counted_and_zero",
         "data/test_volume.py::test_voxels_that_are_not_finite_are_refused",
         "data/test_preprocess.py::test_predict_accepts_what_its_run_accepted_and_counts_it"]),
    Mutation([("data/nifti.py", "* GREYS > high - low:", "* GREYS < 0:")],
        ["data/test_volume.py::test_values_that_float32_cannot_tell_apart_are_refused"]),
    Mutation([("data/nifti.py", "if bad.any():", "if False:")],
        ["data/test_check.py::test_a_label_map_holds_classes_and_the_ignored_value"]),
    Mutation([("data/nifti.py", "and half < QUANTUM", "")],
        ["data/test_nifti.py::test_labels_that_lie_beside_whole_numbers_by_their_scale_are_refused"]),
    Mutation([("data/nifti.py", "array = np.where(is_near, whole, array)", "pass")],
        ["data/test_nifti.py::test_a_mask_that_is_scaled_to_almost_one_is_a_mask"]),
    Mutation([("data/volume.py", "if distance > SAME_GRID else None", "if False else None")],
        ["data/test_check.py::test_a_label_map_elsewhere_is_an_error_or_by_choice_a_warning"]),
    Mutation([("data/volume.py", "if rules.affine:", "if False:")],
        ["data/test_preprocess.py::test_with_affine_check_warn_label_and_image_are_paired_voxel_by_voxel"]),
    Mutation([("data/nifti.py", "else np.moveaxis(array, -1, 0), bad", "else array, bad")],
        ["data/test_volume.py::test_channels_come_first"]),
    Mutation([("build.py", "if own not in (None, found):", "if False:")],
        ["data/test_preprocess.py::test_a_model_for_another_number_of_channels_is_refused"]),
    Mutation([("data/nifti.py", "else array.reshape(image.shape[:3])", "else array")],
        ["data/test_nifti.py::test_axes_of_one_are_dropped"]),
    Mutation([("data/check.py", "elif absent:", "elif False:")],
        ["data/test_check.py::test_a_case_and_a_part_without_a_class_are_warned_of"]),
    Mutation([("data/check.py", 'len(absent) == len(dataset.classes) - 1 and part == "train"', "False")],
        ["data/test_check.py::test_a_training_part_without_any_foreground_is_an_error"]),
    Mutation([("train/metrics.py", "int(p) / int(w) if w else None", "int(p) / int(w) if w else 1.0")],
        ["train/test_metrics.py::test_a_class_absent_from_both_has_no_score_and_absent_from_one_zero"]),
    Mutation([("train/inference.py", "(start - at.start, min(", "(0, min(")],
        ["data/test_preprocess.py::test_thick_slices_and_sizes_that_fit_nothing_train_and_predict"]),
    Mutation([("data/check.py", ".max() > SHEAR:", ".max() < 0:")],
        ["data/test_check.py::test_odd_headers_are_warned_of_with_the_rule_that_is_followed"]),
    Mutation([("data/volume.py", "for path, code in codes if code not in MM)", "for path, code in codes if False)")],
        ["data/test_check.py::test_odd_headers_are_warned_of_with_the_rule_that_is_followed",
         "test_publish.py::test_lengths_that_are_not_in_mm_are_reported_once_a_case"]),
    Mutation([("data/nifti.py", "voxels.dtype, 0, voxels.slope, voxels.inter)", "voxels.dtype, 0, 1, 0)")],
        ["data/test_nifti.py::test_type_scaling_and_byte_order_are_followed"]),
    Mutation([("data/nifti.py", "stream.seek(voxels.offset)", "stream.seek(voxels.offset + 4)")],
        ["data/test_nifti.py::test_compressed_or_not_the_voxels_are_the_same"]),
    Mutation([("data/preprocess.py", "if channel.min() < channel.max() else 1.0", "")],
        ["data/test_preprocess.py::test_a_constant_image_is_finite_once_normalised"]),
    Mutation([("data/preprocess.py", "if channel.min() < channel.max() else", "if np.ptp(channel) else")],
        ["data/test_preprocess.py::test_values_at_both_ends_of_float32_are_normalised_without_a_warning"]),
    Mutation([("data/cases.py", 'if both := sorted({*content["train"]} & {*content["val"]}):', "if both := []:")],
        ["data/test_cases.py::test_a_split_file_that_cannot_be_followed_is_refused"]),
    Mutation([("data/check.py", "{_file(path): case.id for case in train for path in case.images}", "{}")],
        ["data/test_check.py::test_a_link_from_val_to_train_is_an_error"]),
    Mutation([("data/check.py", "seen |= {digests[case.id]: case.id for case in train if case.id in digests}", "pass")],
        ["data/test_check.py::test_the_same_voxels_in_train_and_val_are_an_error_whatever_the_files",
         "data/test_check.py::test_a_run_refuses_a_held_out_image_that_it_learns_from"]),
    Mutation([("build.py", 'content_hashes(c, full=True)["images"]["full"]', "samples[c.id]")],
        ["data/test_check.py::test_images_whose_samples_agree_are_compared_as_a_whole"]),
    Mutation([("data/dataset_json.py", "if self.allow_outside or not outside:", "if True:")],
        ["data/test_cases.py::test_a_path_that_leaves_the_folder_is_refused",
         "data/test_cases.py::test_a_path_out_of_the_root_is_read_only_with_allow_outside"]),
    Mutation([("data/cases.py", "if all(dataset_json.leaves(root, path) for root in roots):", "if False:")],
        ["data/test_cases.py::test_a_link_out_of_the_root_is_refused_in_every_layout"]),
    Mutation([("data/dataset_json.py", "if root is not None and leaves(root, path):", "if False:")],
        ["data/test_cases.py::test_a_link_out_of_the_root_is_refused_in_every_layout"]),
    Mutation([("data/dataset_json.py", "if not is_plain(self.title):", "if False:")],
        ["data/test_cases.py::test_a_wrong_dataset_json_is_refused"]),
    Mutation([("data/dataset_json.py", "if not is_plain(name):", "if False:")],
        ["data/test_cases.py::test_a_wrong_dataset_json_is_refused"]),
    Mutation([("data/dataset_json.py", "if type(value) is not int:", "if not isinstance(value, int):")],
        ["data/test_cases.py::test_a_wrong_nnunet_json_is_refused"]),
    Mutation([("data/dataset_json.py", "if len(text) > MAX_BYTES:", "if False:")],
        ["data/test_cases.py::test_unreadable_json_is_refused_with_its_path"]),
    Mutation([("data/dataset_json.py", "if not path.is_file():", "if False:")],
        ["data/test_cases.py::test_json_that_is_a_pipe_or_a_device_is_refused_at_once"], hangs=True),
    Mutation([("data/cases.py", '.nii.gz")) > MAX_NAME', '.nii.gz")) > 10**6')],
        ["data/test_cases.py::test_folders_that_do_not_match_are_refused",
         "test_publish.py::test_a_label_map_whose_name_no_file_can_have_is_refused_at_the_start"]),
    Mutation([("data/cases.py", "if not is_plain(case.id):", "if False:")],
        ["data/test_cases.py::test_folders_that_do_not_match_are_refused"]),
    # prepared cases that outlive their data set
    Mutation([("build.py", 'return {} if options.cache == "memory"',
          'return globals().setdefault("kept", {}) if options.cache == "memory"')],
        ["data/test_preprocess.py::test_a_file_that_changed_is_seen_by_the_next_run"]),
    Mutation([("data/preprocess.py", "return key_of(hashes, options,", "return key_of(case.id, options,")],
        ["data/test_disk_cache.py::test_files_and_options_that_change_have_other_entries"]),
    Mutation([("data/preprocess.py", "if any(now[kind][of] != before[kind][of]",
          "if False and any(now[kind][of] != before[kind][of]")],
        ["data/test_disk_cache.py::test_a_file_that_changes_while_it_is_prepared_is_not_kept"]),
    # files that are read as a whole, or count as memory
    Mutation([("data/disk_cache.py", 'np.asarray(np.lib.format.open_memmap(path, "r"))', "np.load(path)")],
        ["data/test_disk_cache.py::test_more_data_than_the_process_may_take_trains_from_disk"]),
    Mutation([("data/disk_cache.py", "resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY", "True")],
        ["data/test_disk_cache.py::test_more_data_than_the_process_may_take_trains_from_disk"]),
    Mutation([("data/patches.py", "image = image[(slice(None), *box)]", "pass"),
         ("data/patches.py", "index_select(axis, indices - indices.min())", "index_select(axis, indices)")],
        ["data/test_disk_cache.py::test_a_patch_touches_its_own_bytes_alone"]),
    Mutation([("data/disk_cache.py", ', *place.glob(".*.tmp")):', "):")],
        ["data/test_disk_cache.py::test_killed_while_preparing_the_next_run_goes_on",
         "data/test_disk_cache.py::test_leftovers_of_the_dead_are_swept_and_those_of_the_living_kept"]),
    Mutation([("data/disk_cache.py", "if is_held and not", "if not")],
        ["data/test_disk_cache.py::test_leftovers_of_the_dead_are_swept_and_those_of_the_living_kept"]),
    Mutation([("data/disk_cache.py", "fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)", "max(1")],
        ["data/test_disk_cache.py::test_two_runs_that_prepare_at_once_share_the_work",
         "data/test_disk_cache.py::test_who_finds_a_key_held_waits_for_its_whole_file"]),
    Mutation([("data/disk_cache.py", "                    return None\n", "                    pass\n")],
        ["data/test_disk_cache.py::test_a_damaged_file_is_made_again_and_never_run"]),
    Mutation([("data/disk_cache.py", "(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError)",
          "FileNotFoundError")],
        ["data/test_disk_cache.py::test_an_index_of_anything_else_is_written_again"]),
    Mutation([("data/disk_cache.py", "(FileNotFoundError, ValueError,", "(ValueError,")],
        ["data/test_disk_cache.py::test_a_cache_that_is_removed_during_a_run_is_made_again"]),
    Mutation([("data/disk_cache.py", 'of = "full" if self.full else "sample"', 'of = "sample"')],
        ["data/test_disk_cache.py::test_bytes_between_the_sampled_ones_are_compared_on_request"]),
    Mutation([("config.py", '{"True": "memory", "False": "off"}.get(str(self.cache), self.cache)', "self.cache")],
        ["data/test_disk_cache.py::test_what_older_versions_wrote_is_understood",
         "data/test_disk_cache.py::test_a_run_of_an_older_version_goes_on"]),
    Mutation([("data/loader.py", "raise lost(error, missing) or RuntimeError(missing + text[-1]) from error", "raise")],
        ["data/test_loader.py::test_an_error_in_a_worker_names_its_cases_and_keeps_its_trace",
         "data/test_loader.py::test_a_worker_that_is_killed_is_reported_with_the_missing_cases"]),
    Mutation([("data/loader.py", "timeout=timeout if config.workers else 0", "timeout=0")],
        ["data/test_loader.py::test_a_worker_that_hangs_is_ended_by_the_timeout"], hangs=True),
    # a batch that torch's own thread cannot send
    Mutation([("data/loader.py", "if get_worker_info() is not None:", "if False:")],
        ["data/test_loader.py::test_a_worker_that_cannot_hand_over_its_batch_names_shared_memory"]),
    Mutation([("data/loader.py", "if is_out_of_files(error):", "if False:")],
        ["data/test_loader.py::test_a_batch_that_cannot_be_received_names_the_limit"]),
    Mutation([("data/loader.py", "found.f_blocks and free < needed:", "False:")],
        ["test_limits.py::test_shared_memory_that_is_too_small_is_refused_before_workers_start",
         "test_limits.py::test_a_run_in_a_container_with_little_shared_memory_is_one_line"]),
    Mutation([("data/loader.py", "range(16 + 8 * workers + 2 * batches)", "range(0)"),
         ("errors.py", "return error.errno in (errno.EMFILE, errno.ENFILE)", "return False")],
        ["test_limits.py::test_too_few_open_files_are_one_line_that_names_the_limit",
         "test_limits.py::test_open_files_that_run_out_elsewhere_are_named"]),
    Mutation([("run/run.py", "if dead := lost(error):", "if dead := None:")],
        ["data/test_loader.py::test_a_run_whose_worker_is_killed_within_a_step_ends_with_1_and_one_line"]),
)

TRAINING = (
    Mutation([("errors.py", "\"can't allocate\",", ""), ("errors.py", '"Cannot allocate memory",', "")],
        ["test_cli.py::test_memory_that_runs_out_is_one_message_with_remedies_and_the_snapshot_is_kept"]),
    Mutation([("run/run.py", "budget.oom_in_validation(self.config, self.trainer.step)",
          "budget.oom_moment(self.meter.ledger)")],
        ["test_faults_run.py::test_memory_that_runs_out_in_a_validation_is_not_reported_as_a_steps"]),
    Mutation([("cli/lifecycle.py", "if errors.is_out_of_memory(error):", "if False:")],
        ["test_faults_run.py::test_any_error_of_a_job_is_its_last_line"]),
    Mutation([("errors.py", '"could not create a primitive(?! descriptor)",', "")],
        ["memory/test_cuda.py::test_what_counts_as_out_of_memory"]),
    Mutation([("cli/libraries.py", "if not address_limit():", "if True:")],
        ["test_limits.py::test_too_little_address_space_for_the_libraries_is_exit_5"], hangs=True),
    Mutation([("files.py", "error.filename, error.filename2 = str(path), None", "pass")],
        ["test_full_disk.py::test_a_command_on_a_full_disk_is_one_line_and_leaves_nothing_half_written",
         "test_full_disk.py::test_a_file_that_may_not_grow_is_one_line_that_names_it"]),
    Mutation([("cli/lifecycle.py", "        reserve.close()", "        pass")],
        ["test_limits.py::test_a_run_that_holds_every_byte_ends_in_a_line"]),
    Mutation([("errors.py", "return bool(address_limit())", "return False")],
        ["test_limits.py::test_an_error_that_python_lost_is_of_memory_where_that_is_limited"]),
    Mutation([("cli/main.py", "if arguments.run in (_memory,", "if arguments.run in ()[:0] and (_memory,")],
        ["test_limits.py::test_too_little_address_space_is_exit_5_of_every_command"]),
    Mutation([("train/step.py", "_refuse_non_finite(result, model, scaler, batches)", "pass")],
        ["test_faults_run.py::test_a_poisoned_batch_is_kept_and_changes_no_weight",
         "train/test_step.py::test_a_non_finite_loss_stops_before_the_update",
         "train/test_step.py::test_a_non_finite_gradient_stops_before_the_update"]),
    Mutation([("train/step.py", "scaler.step(optimizer)", "optimizer.step()")],
        ["train/test_step.py::test_fp16_skips_the_update_and_lowers_the_scale"]),
    Mutation([("train/step.py", "and scaler.get_scale() >= LOWEST_SCALE", "")],
        ["train/test_step.py::test_fp16_that_overflows_at_any_scale_is_stopped"]),
    Mutation([("train/step.py", "LOWEST_SCALE and statistics_hold:", "LOWEST_SCALE:")],
        ["train/test_step.py::test_fp16_that_overflows_into_running_statistics_is_stopped"]),
    Mutation([("train/losses.py", "mass = mass.clamp(min=1e-8)", "pass")],
        ["train/test_losses.py::test_nothing_but_ignored_voxels_gives_zero_and_zero_gradients"]),
    Mutation([("train/losses.py", "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype")],
        ["train/test_losses.py::test_half_precision_logits_are_summed_in_float32"]),
    Mutation([("report/loggers.py", "except Exception as error:", "except KeyError as error:")],
        ["test_faults_run.py::test_a_lost_logger_costs_one_line",
         "report/test_loggers.py::test_a_killed_wandb_core_costs_one_line_and_no_record",
         "report/test_loggers.py::test_wandb_that_cannot_be_loaded_costs_one_line"]),
    Mutation([("report/wandb_logger.py", 'if mode != "online":', "if True:")],
        ["report/test_loggers.py::test_without_a_key_an_online_run_goes_on_offline_with_one_line",
         "report/test_loggers.py::test_without_network_an_online_run_goes_on_offline_with_one_line_and_the_same_id"]),
    Mutation([("report/loggers.py", 'if wandb_mode(config) != "disabled":', "if True:")],
        ["report/test_loggers.py::test_disabled_wandb_is_not_even_loaded"]),
    Mutation([("report/wandb_logger.py", '"init_timeout": 20', '"init_timeout": 90')],
        ["report/test_loggers.py::test_every_private_setting_is_known_to_this_wandb"]),
    Mutation([("report/loggers.py", 'path.open("ab+", buffering=0)', 'path.open("ab+")')],
        ["report/test_loggers.py::test_a_killed_run_has_every_record_that_it_wrote"]),
    Mutation([("report/loggers.py", 'if self._file.read() not in (b"", b"\\n"):', "if False:")],
        ["report/test_loggers.py::test_a_resumed_run_appends_after_a_record_that_was_cut_short"]),
    Mutation([("cli/train.py", "lifecycle.install_safe_streams()", "pass")],
        ["test_faults_run.py::test_a_run_needs_no_reader",
         "test_faults_run.py::test_the_reader_of_the_first_line_may_leave"]),
    Mutation([("cli/train.py", "with suppress(SystemExit), lifecycle", "with lifecycle")],
        ["test_sweep.py::test_a_flag_may_stand_between_overrides_and_a_failed_job_stops_no_other"]),
    Mutation([("cli/sweep.py", "    if is_asked:", "    if code:")],
        ["test_sweep.py::test_a_sweep_ends_with_its_comparison_and_a_failed_job_is_a_row",
         "test_launchers.py::test_joblib_runs_every_job_whatever_becomes_of_one"]),
    Mutation([("cli/sweep.py", "    if is_asked:", "    if False:"),
         ("cli/sweep.py", "    stopped.set()\n    for worker", "    for worker")],
        ["test_sweep.py::test_an_interrupted_job_ends_the_sweep_in_good_order"]),
    Mutation([("cli/sweep.py", "    if is_asked:", "    if False:")],
        ["test_launchers.py::test_a_sweep_that_is_stopped_ends_its_jobs_in_good_order_and_begins_no_other"],
        hangs=True),
    # one of joblib's processes that waits would end, and joblib would kill the others
    Mutation([("cli/sweep.py", "        if _children(worker):", "        if worker:")],
        ["test_launchers.py::test_a_sweep_that_is_stopped_ends_its_jobs_in_good_order_and_begins_no_other"]),
    Mutation([("signals.py", "signal.SIGUSR1, signal.SIGUSR2,", "signal.SIGUSR1,")],
        ["test_launchers.py::test_submitit_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder"]),
    Mutation([("cli/lifecycle.py", "            earlier[number](number, None)", "            pass")],
        ["test_launchers.py::test_submitit_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder"]),
    Mutation([("cli/sweep.py", "*searched, GOES_ON, lifecycle", "*searched, lifecycle")],
        ["test_launchers.py::test_submitit_runs_every_job_and_one_that_it_requeues_goes_on_in_its_folder"]),
    Mutation([("cli/sweep.py", "    if folder.is_dir() and not goes_on:", "    if False:")],
        ["test_launchers.py::test_a_sweep_goes_on_only_when_asked"]),
    Mutation([("compose.py", 'if first.resume not in (None, "auto"):', "if first.resume is not None:")],
        ["test_launchers.py::test_the_sweep_of_an_experiment_goes_on_with_all_its_jobs"]),
    Mutation([("compose.py", "_options(_tree(overrides))\n",
          "_options(_tree([word for word in overrides if not word.startswith('experiment=')]))\n")],
        ["test_command_line.py::test_a_job_of_an_experiment_goes_on_with_the_words_that_began_it"]),
    Mutation([("cli/sweep.py", '    lifecycle.write_end(job.folder, "failed: did not begin", 1)', "    pass")],
        ["test_launchers.py::test_a_job_that_never_began_is_a_row_that_says_so"]),
    Mutation([("cli/sweep.py", "    if max(codes) and before", "    if False and before")],
        ["test_launchers.py::test_a_launcher_that_fails_is_one_line_and_leaves_no_table"]),
    Mutation([("compose.py", 'if group == "hydra/launcher" and name in LAUNCHERS:', "if False:")],
        ["test_launchers.py::test_a_launcher_that_is_not_installed_is_one_line"]),
    Mutation([("cli/lifecycle.py", "(code if code >= 0 else 128 - code), False", "code, False")],
        ["test_sweep.py::test_a_process_that_was_killed_is_named_by_its_signal"]),
    Mutation([("train/optim.py", "return 1 / 25 + (1 - 1 / 25)", "return 1 / 24 + (1 - 1 / 24)")],
        ["train/test_golden.py::test_a_training_takes_the_course_it_always_took"]),
    # durations by a clock that may jump
    Mutation([("train/trainer.py", "started = time.perf_counter()", "started = time.time()"),
         ("train/trainer.py", "wait, rate = time.perf_counter()", "wait, rate = time.time()"),
         ("train/trainer.py", '"time/step_s": time.perf_counter()', '"time/step_s": time.time()')],
        ["test_faults_run.py::test_the_clock_does_not_matter_and_nothing_is_written_beside_the_sources"]),
)

CONFIG = (
    Mutation([("cli/train.py", "words = checked_arguments(sys.argv[1:])", "words = sys.argv[1:]")],
        ["test_cli.py::test_a_mistake_is_one_line_and_exit_2_without_a_trace"]),
    Mutation([("cli/train.py", "from unet3d import checks, compose", "from unet3d import build, checks, compose")],
        ["test_cli.py::test_a_mistake_loads_neither_torch_nor_monai"]),
    Mutation([("checks.py", "if is_number and (item != item or", "if False and (item != item or")],
        ["test_compose.py::test_a_wrong_option_is_one_line"]),
    Mutation([("checks.py", "if among and value not in among:", "if False:")],
        ["test_compose.py::test_a_wrong_option_is_one_line"]),
    Mutation([("cli/train.py", "    if unknown:", "    if False:")],
        ["test_command_line.py::test_a_flag_that_does_not_exist_is_one_line_that_says_what_to_write"]),
    Mutation([("checks.py", "if bad := sorted(w for w in widths if w % model.groups):", "if bad := []:")],
        ["test_compose.py::test_options_at_odds_are_one_line"]),
    Mutation([("checks.py", "if n in given and is_idle(counted)}", "if False}")],
        ["test_compose.py::test_an_option_that_does_nothing_is_one_warning"]),
    Mutation([ANY_KEY],
        ["test_security.py::test_a_target_on_the_command_line_is_no_option"]),
    Mutation([("compose.py", "    check(config, here)", "    pass")],
        ["test_compose.py::test_a_snapshots_config_is_checked_and_cannot_add_keys"]),
    Mutation([("config.py", 'among=("poly", "cosine", "one_cycle", "constant")',
          'among=("poly", "cosine", "constant")')],
        ["test_compose.py::test_every_yaml_composes"]),
    Mutation([("checks.py", "return 2 * len(model.features)", "return 0")],
        ["test_docs.py::test_training_commands_compose"]),
    Mutation([("cli/main.py", 'command("check-data", _check_data', 'command("check", _check_data')],
        ["test_docs.py::test_other_commands_parse"]),
    Mutation([("compose.py", 'if "${" in str(value):', "if False:")],
        ["test_command_line.py::test_what_resuming_would_resolve_once_more_is_refused"]),
    Mutation([("compose.py", "hydra.compose(name, list(overrides),", "hydra.compose(name, [*overrides][::2],")],
        ["test_compose.py::test_the_command_line_overrides_an_experiment"]),
    Mutation([("compose.py", "OmegaConf.merge(OmegaConf.structured(Config), values)", "OmegaConf.structured(Config)")],
        ["test_compose.py::test_plain_values_round_trip"]),
)

PREDICTION = (
    Mutation([("run/predict.py", "    save_labels(path, labels", "        save_labels(path, labels")],
        ["test_predictions.py::test_shards_are_disjoint_and_complete_and_one_that_was_killed_writes_what_is_missing"]),
    Mutation([("run/predict.py", "sorted(grouped)[index::shards]", "[*grouped][index::shards]")],
        ["test_predictions.py::test_a_shard_is_the_same_cases_in_whatever_order_the_files_are_named"]),
    Mutation([("cli/main.py", "int(index) < int(count)", "True")],
        ["test_predictions.py::test_a_shard_that_is_no_part_is_one_line"]),
    Mutation([("data/nifti.py", "labels.astype(kind), None,", "labels.astype(kind), np.eye(4),")],
        ["test_cli.py::test_predict_writes_label_maps_on_the_inputs_grid"]),
    Mutation([("cli/main.py", "    except UserError as error:", "    except KeyError as error:")],
        ["test_cli.py::test_predict_writes_label_maps_on_the_inputs_grid"]),
    Mutation([("data/volume.py", "apply_orientation(labels, axes)[box] =", "labels[box] =")],
        ["data/test_volume.py::test_labels_return_to_their_file_unchanged",
         "data/test_volume.py::test_resampled_labels_return_within_a_voxel"]),
    Mutation([("data/nifti.py", 'header["cal_min"] = header["cal_max"] = 0', "pass")],
        ["data/test_nifti.py::test_saved_labels_keep_the_header_to_the_bit_but_for_the_intensities"]),
    Mutation([("run/predict.py", "problems.append(str(error))", "raise")],
        ["test_publish.py::test_files_that_are_no_case_stop_no_other_and_what_is_accepted_is_a_warning"]),
    Mutation([("cli/main.py", "except (RuntimeError, MemoryError) as error:  # perhaps",
          "except KeyError as error:  # perhaps")],
        ["test_publish.py::test_a_volume_that_memory_does_not_hold_stops_no_other"]),
    Mutation([("run/predict.py", "except OSError as error:", "except KeyError as error:")],
        ["test_cli.py::test_an_input_that_cannot_be_read_stops_no_other"]),
    Mutation([("cli/main.py", "if arguments.overwrite or not path.exists()]", "]")],
        ["test_cli.py::test_predict_replaces_a_file_only_when_asked"]),
    Mutation([("cli/main.py", "if os.path.realpath(path) in images]:", "if False]:")],
        ["test_publish.py::test_predict_replaces_no_image"]),
    Mutation(IN_PLACE,
        ["data/test_nifti.py::test_a_write_that_fails_leaves_the_old_file_and_no_other"]),
    Mutation([("train/inference.py", ".add_(weight.permute(axes))", ".add_(1)")],
        ["train/test_inference.py::test_windows_of_any_number_leave_pointwise_logits_as_they_are"]),
    Mutation([("train/inference.py", "stride = min(total_stride, w)", "stride = 1")],
        ["train/test_inference.py::test_valid_tiles_have_no_seams"]),
    Mutation([("train/inference.py", "if flipped else logits", "if False else logits")],
        ["train/test_inference.py::test_mirroring_makes_the_prediction_symmetric"]),
    Mutation([("train/inference.py", "strip[:, : carried.shape[1], kept:] = carried",
          "strip[:, : carried.shape[1], kept:] = 0")],
        ["train/test_inference.py::test_labels_by_strips_are_the_dense_ones"]),
    Mutation([("train/inference.py", "= min(itertools.permutations(", "= max(itertools.permutations(")],
        ["train/test_inference.py::test_memory_is_that_of_a_strip_and_of_what_slabs_share_whatever_the_length"]),
    Mutation([("data/volume.py", "[self._rows[label], joined], row) if strip.corner[row]",
          "[joined[:, :1] * 0, joined], row) if strip.corner[row]")],
        ["data/test_volume.py::test_strips_on_the_files_grid_are_the_volume_in_one_piece"]),
    Mutation([("data/volume.py", "raise self._error", "pass")],
        ["test_predictions.py::test_what_ends_a_prediction_early_leaves_no_score_though_it_ended_while_strips_were_kept"]),
    # a size that the export would keep
    Mutation([("model/blocks.py", "y: Tensor = self.conv2(self.conv1(x))",
          "y: Tensor = self.conv2(self.conv1(x)) / int(x.shape[2])")],
        ["model/test_unet.py::test_an_exported_network_computes_the_same_for_any_size"]),
)

STRANGERS = (
    Mutation([("data/disk_cache.py", 'np.lib.format.open_memmap(path, "r")', "np.load(path, allow_pickle=True)")],
        ["data/test_disk_cache.py::test_hashes_of_a_stranger_cannot_make_it_load_objects"]),
    Mutation([("data/disk_cache.py", "mkdir(mode=0o700, ", "mkdir(")],
        ["data/test_disk_cache.py::test_the_default_folder_is_the_users_cache"]),
    # the folder's overrides given to Hydra once more
    Mutation([("cli/train.py", "return [*overrides, lifecycle.path_option(",
          "return [*lifecycle.earlier_overrides(folder), *overrides, lifecycle.path_option(")],
        ["test_security.py::test_a_config_in_a_run_folder_is_not_composed"]),
    Mutation([("compose.py", "if now[name] and now[name] != own[name]]", "if False]")],
        ["test_security.py::test_a_config_in_a_run_folder_is_options_and_nothing_else",
         "test_own_parts.py::test_a_run_resumes_only_with_code_that_the_command_line_names"]),
    Mutation([("files.py", "if isinstance(event, yaml.AliasEvent) or depth > DEEPEST_YAML:", "if False:")],
        ["test_security.py::test_a_config_in_a_run_folder_is_options_and_nothing_else"]),
    Mutation([("cli/train.py", 'values = read_yaml(folder / "config.yaml")',
          "values = read_yaml(folder / lifecycle.OVERRIDES)")],
        ["test_command_line.py::test_a_run_goes_on_from_its_config_alone"]),
    Mutation([("compose.py", 'if "${" in repr(values):', "if False:")],
        ["test_security.py::test_a_snapshot_cannot_ask_for_the_environment"]),
    Mutation([("run/predict.py", "if config.model.path != model_path:", "if False:")],
        ["test_security.py::test_a_network_that_only_a_snapshot_names_is_not_imported"]),
    Mutation([("files.py", "if os.path.islink(path) and", "if False and")],
        ["test_security.py::test_nothing_is_read_or_written_through_a_link_out_of_a_run_folder"]),
    Mutation([("cli/lifecycle.py", "if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:", "if False:")],
        ["test_security.py::test_a_lock_that_is_another_file_s_name_is_not_written_to"]),
    Mutation([("cli/lifecycle.py", "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW", "os.O_RDWR | os.O_CREAT")],
        ["test_security.py::test_a_lock_that_is_another_file_s_name_is_not_written_to"]),
    Mutation([("files.py", 'f".{secrets.token_hex(8)}.tmp"', '".next.tmp"')],
        ["test_security.py::test_a_file_is_replaced_by_way_of_a_name_that_nobody_knows"]),
    Mutation([("files.py", 'temporary.open("x+b")', 'temporary.open("w+b")')],
        ["test_security.py::test_a_file_is_replaced_by_way_of_a_name_that_nobody_knows"]),
    Mutation([("files.py", "if not stat.S_ISREG(found.st_mode):", "if False:")],
        ["test_security.py::test_a_pipe_or_an_endless_file_in_a_run_folder_is_not_read"]),
    Mutation([("files.py", "if found.st_size > most:", "if False:")],
        ["test_security.py::test_a_pipe_or_an_endless_file_in_a_run_folder_is_not_read"]),
    Mutation([("report/html.py", ' if content.startswith(PNG) else ""', "")],
        ["test_security.py::test_only_pictures_are_shown_as_pictures"]),
    # for values that are not deep
    Mutation([("train/checkpoint.py", "if left < 0 or depth > DEEPEST:", "if depth > DEEPEST:")],
        ["test_security.py::test_a_small_snapshot_that_describes_much_is_refused"]),
    # for values that are few
    Mutation([("train/checkpoint.py", "if left < 0 or depth > DEEPEST:", "if left < 0:")],
        ["test_security.py::test_a_small_snapshot_that_describes_much_is_refused"]),
    Mutation([("checks.py", "if levels > MOST_LEVELS:", "if False:")],
        ["test_security.py::test_a_network_of_thousands_of_levels_is_refused"], hangs=True),
    Mutation([("train/checkpoint.py", "if is_packed or sum(", "if False and sum(")],
        ["test_security.py::test_a_snapshot_that_is_packed_is_refused_before_it_is_unpacked"]),
    Mutation([("run/predict.py", 'with torch.device("meta"):', 'with torch.device("cpu"):')],
        ["test_security.py::test_a_snapshot_that_describes_a_huge_network_takes_no_memory"]),
    Mutation([("run/predict.py", "for value in weights.values()) > path.stat().st_size:",
          "for value in weights.values()) < 0:")],
        ["test_publish.py::test_a_small_file_that_describes_many_or_large_networks_takes_no_memory"]),
    Mutation([("memory/simulate.py", "if needed > memory:", "if False:")],
        ["test_security.py::test_a_snapshot_that_names_a_huge_window_takes_no_memory"]),
    Mutation([("report/html.py", 'return f"<{tag}>{escape(text)}</{tag}>"', 'return f"<{tag}>{text}</{tag}>"')],
        ["report/test_report.py::test_everything_that_is_shown_is_escaped"]),
    Mutation([("report/run_folder.py", ' if re.fullmatch("[0-9a-f]{40,64}", said) else None', "")],
        ["report/test_report.py::test_the_commit_is_that_of_the_tree_and_nothing_runs"]),
    Mutation([("report/run_folder.py", "if is_sound.get(key, True)}", "}")],
        ["report/test_report.py::test_a_damaged_memory_json_ends_no_report"]),
    Mutation([("report/run_folder.py", 'if fits(one.get("step"), int) and', 'if "step" in one and')],
        ["report/test_report.py::test_a_damaged_record_is_passed_over"]),
    Mutation([("files.py", "if not stat.S_ISREG(found.st_mode):", "if False:"),
         ("files.py", 'raise UserError(f"{path}: cannot be read ({error.strerror})") from error', "raise")],
        ["test_security.py::test_a_file_may_not_be_a_folder_or_a_circle_of_links"]),
    Mutation([("files.py", "except (*TAGGED, yaml.YAMLError) as error:", "except yaml.YAMLError as error:"),
         ("files.py", "return _plain(yaml.safe_load(text))", "return yaml.safe_load(text)")],
        ["test_security.py::test_yaml_holds_what_a_config_holds"]),
    Mutation([("files.py", "count(os.sep) > DEEPEST_FOLDER:", "count(os.sep) > 10**6:")],
        ["test_security.py::test_folders_within_folders_without_end_are_refused"]),
    Mutation([("report/report.py", "columns[: min(MOST_COLUMNS,", "columns[: max(MOST_COLUMNS,")],
        ["test_security.py::test_a_table_is_as_large_as_its_file"]),
    Mutation([("report/run_folder.py", "environment={k: str(v) for", "environment={k: v for")],
        ["report/test_compare.py::test_what_is_not_comparable_is_printed_with_key_and_values"]),
    Mutation([("report/run_folder.py", "except (ValueError, RecursionError):", "except RecursionError:")],
        ["report/test_report.py::test_files_that_a_kill_cut_short_end_no_report"]),
    Mutation([("train/checkpoint.py", "except Exception as error:", "except OSError as error:")],
        ["test_fuzz.py::test_a_damaged_run_folder_is_refused_or_harmless"]),
    Mutation([("train/checkpoint.py", "    refuse_non_finite(found, path)\n", "")],
        ["test_start.py::test_files_that_are_no_snapshot_of_this_network_are_refused"]),
    Mutation([("run/start.py", "    if theirs != model_path:", "    if False:")],
        ["test_start.py::test_files_that_are_no_snapshot_of_this_network_are_refused"]),
    Mutation([("report/html.py", "return escaped(page.substitute(",
          "return (lambda text, keep: text)(page.substitute(")],
        ["report/test_report.py::test_control_codes_in_a_run_folder_reach_no_terminal_page_or_table"]),
    Mutation([("train/checkpoint.py", "(escaped(name), theirs", "(name, theirs")],
        ["test_cli.py::test_names_in_a_snapshot_cannot_command_a_terminal"]),
    Mutation([("cli/main.py", "print(*map(escaped, paths)", "print(*paths")],
        ["test_cli.py::test_names_of_files_neither_command_a_terminal_nor_end_the_work"]),
    Mutation([("cli/main.py", "print(*map(escaped, [*lines, *found])", "print(*map(str, [*lines, *found])")],
        ["test_cli.py::test_names_in_a_data_set_cannot_command_a_terminal"]),
    # two layers: the error's text, and what prints it
    Mutation([("errors.py", 'return escaped(super().__str__(), keep="\\n")', "return super().__str__()"),
         ("cli/lifecycle.py", 'print(errors.escaped(line, keep="\\n")', "print(line")],
        ["test_cli.py::test_a_value_of_an_option_cannot_command_a_terminal"]),
    Mutation([("errors.py", "c if c.isprintable() or c in keep", 'c if c not in "\\x1b\\x9b" or c in keep')],
        ["test_command_line.py::test_what_is_not_printable_is_escaped"]),
    Mutation([("report/loggers.py", "made.add_row(*map(escaped, row))", "made.add_row(*row)")],
        ["report/test_loggers.py::test_a_table_shows_what_would_command_a_terminal_and_keeps_every_language"]),
    Mutation([("report/loggers.py", 'print(f"warning: {escaped(text)}"', 'print(f"warning: {text}"')],
        ["report/test_loggers.py::test_a_warning_is_one_line_of_text"]),
    Mutation([("files.py", "if FORMULA.match(text) else text", "if False else text")],
        ["report/test_report.py::test_no_cell_of_a_table_is_a_formula_and_numbers_are_as_they_were"]),
    Mutation([("files.py", "and FORMULA.match(cell) else cell", "and False else cell")],
        ["report/test_report.py::test_names_of_cases_are_read_from_a_table_of_scores_as_they_were"]),
    Mutation([("report/wandb_logger.py", "QUIET | (PRIVATE if self._private else {})", "QUIET")],
        ["report/test_loggers.py::test_a_private_run_records_nothing_about_machine_user_and_paths"]),
)

DISK = (
    # torch raises its own error over that of the disk
    Mutation([("train/checkpoint.py", "except (OSError, RuntimeError) as error:", "except OSError as error:")],
        ["train/test_faults_snapshot.py::test_a_file_that_may_not_grow_costs_no_snapshot",
         "train/test_faults_snapshot.py::test_a_disk_with_little_room_costs_no_snapshot",
         "train/test_faults_snapshot.py::test_a_run_on_a_small_disk_finishes_or_goes_on_once_there_is_room"]),
    Mutation([("train/checkpoint.py", "except (OSError, RuntimeError) as error:", "except KeyError as error:")],
        ["train/test_faults_snapshot.py::test_a_full_disk_keeps_the_snapshot_that_was_there",
         "train/test_faults_snapshot.py::test_training_goes_on_while_the_disk_is_full",
         "train/test_faults_snapshot.py::test_a_disk_that_is_full_at_the_end_is_an_error"]),
    Mutation([("report/loggers.py", "            if not is_disk_full(error):", "            if True:")],
        ["train/test_faults_snapshot.py::test_a_disk_full_to_the_last_byte_costs_no_record"]),
    Mutation([("cli/lifecycle.py", "if isinstance(error, OSError) and errors.is_disk_full(error):", "if False:")],
        ["train/test_faults_snapshot.py::test_a_disk_that_is_full_as_a_run_begins_is_one_line",
         "train/test_faults_snapshot.py::test_a_disk_that_is_full_as_pictures_are_drawn_is_one_line"]),
    Mutation([("run/validate.py", "        except UserError:", "        except KeyError:")],
        ["test_predictions.py::test_a_disk_that_is_full_as_label_maps_are_written_is_one_line_and_loses_no_score"]),
    Mutation([("data/preprocess.py", "if needed >= available:", "if False:")],
        ["data/test_preprocess.py::test_cases_that_need_more_than_the_memory_are_refused_before_any_voxel_is_read"]),
    Mutation([("data/preprocess.py", "if needed >= free:", "if False:")],
        ["data/test_disk_cache.py::test_too_small_a_disk_is_refused_before_a_case_is_written"]),
    Mutation([("data/disk_cache.py", "            self._remove(key)\n            if is", "            if is")],
        ["data/test_disk_cache.py::test_a_disk_that_fills_while_preparing_is_one_line_and_nothing_half"]),
    Mutation([("data/disk_cache.py", "except OSError as error:\n            raise self._problem(self.root, f",
          "except KeyError as error:\n            raise self._problem(self.root, f")],
        ["data/test_disk_cache.py::test_a_folder_that_cannot_be_used_is_one_line"]),
)
# fmt: on

RANKS = (
    Mutation(
        [("train/losses.py", "        ranks.add_up([surprise, mass,", "        list([surprise, mass,")],
        ["test_ranks.py::test_two_ranks_with_one_patch_each_are_one_with_two"],
    ),
    Mutation(
        [("run/resume.py", '*state.get("ranks", [])', "")],
        ["test_ranks.py::test_a_run_goes_on_with_another_number_of_ranks"],
    ),
    Mutation([("ranks.py", "        say_end(error)\n", "")], ["test_ranks.py::test_a_rank_says_how_the_first_ended"]),
    Mutation(
        [("ranks.py", "        if killed:", "        if False:")],
        ["test_ranks.py::test_however_a_rank_ends_the_first_says_so_and_the_run_goes_on_from_its_snapshot"],
    ),
    Mutation(
        [("ranks.py", "world_size=SIZE, timeout=limit)", "world_size=SIZE)")],
        ["test_ranks.py::test_however_a_rank_ends_the_first_says_so_and_the_run_goes_on_from_its_snapshot"],
        hangs=True,
    ),
    Mutation(
        [("ranks.py", "    if problem is not None:", "    if problem is not None and RANK == 0:")],
        ["test_ranks.py::test_a_snapshot_that_cannot_be_written_stops_all_ranks_at_the_end"],
        hangs=True,
    ),
    Mutation(
        [("run/run.py", "ranks.agreed(self.stop.asked or 0)", "ranks.gather(self.stop.asked or 0)[0]")],
        ["test_ranks.py::test_a_signal_within_a_validation_ends_it_on_all_ranks"],
    ),
    Mutation(
        [("cli/lifecycle.py", "ends_at_once = config.dry_run and ranks.SIZE == 1", "ends_at_once = config.dry_run")],
        ["test_ranks.py::test_a_signal_to_a_rank_that_has_predicted_leaves_its_exit_code"],
    ),
    Mutation(
        [("ranks.py", "    import torch.distributed.nn  #", "    #")],
        ["test_ranks.py::test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on_by_itself"],
    ),
    Mutation(
        [("signals.py", "signal.SIG_IGN if is_last and ranks.SIZE > 1 else earlier", "earlier")],
        ["test_ranks.py::test_a_signal_to_a_rank_that_is_ending_leaves_its_exit_code"],
    ),
    Mutation(
        [("run/run.py", "for own in ranks.gather(error.batches)", "for own in [error.batches]")],
        ["test_ranks.py::test_a_loss_that_is_not_finite_names_and_keeps_the_patches_of_all_ranks"],
    ),
    Mutation(
        [("ranks.py", 'os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")', '"0"')],
        ["test_ranks.py::test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on_by_itself"],
        hangs=True,
    ),
)

MUTATIONS = (*RESUME, *SNAPSHOTS, *DATA, *TRAINING, *CONFIG, *PREDICTION, *STRANGERS, *DISK, *RANKS)


def copy_tree(to: Path) -> None:
    """What the tests need of this tree, as it is now."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (to / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, to / name)


@contextmanager
def mutated(tree: Path, mutation: Mutation) -> Iterator[None]:
    """Within, the package of the tree has these changes."""
    before = {path: path.read_text() for path in (tree / "unet3d" / name for name, *_ in mutation.changes)}
    try:
        for name, old, new in mutation.changes:
            text = (tree / "unet3d" / name).read_text()
            assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
            (tree / "unet3d" / name).write_text(text.replace(old, new))
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def run_alone(tree: Path, test: str, seconds: int) -> tuple[int, str]:
    """Exit code and output of pytest on one test of the tree; nothing that it started is left."""
    words = ["-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(seconds), f"--basetemp={tree}/tmp"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with (tree / "output").open("wb") as file:  # no pipe: what is left of a test would hold it
        child = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words, f"tests/{test}"],
            cwd=tree,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, resource.RLIM_INFINITY)),
        )
        try:
            child.wait(timeout=seconds + 30)
        except subprocess.TimeoutExpired:
            file.write(b"+ Timeout +")
        finally:
            end_session(child.pid)
    return child.wait(), (tree / "output").read_text(errors="replace")


def end_session(leader: int) -> None:
    """Kill what is left of the session that this process led."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                os.kill(int(path.name), signal.SIGKILL)


def outcome(mutation: Mutation, code: int, output: str) -> str:
    """In words; "seen to fail" is what is wanted."""
    if re.search(r"Timeout \(>|\+ Timeout \+", output):
        return "seen to fail, by a hang" if mutation.hangs else "HANGS"
    if code == 1:
        return "seen to fail" if re.search(r"^FAILED ", output, re.MULTILINE) else "FAILS AS IT IS SET UP"
    if code == 0 and re.search(r"^[0-9]+ skipped", output, re.MULTILINE):
        return "SKIPPED HERE"
    return {0: "STILL PASSES", 4: "NO SUCH TEST", 5: "NO SUCH TEST"}.get(code, f"ENDS WITH EXIT CODE {code}")


def main() -> int:
    """Prints a line a test; returns 1 where one was not seen to fail."""
    words = sys.argv[1:] or [""]
    chosen = [(m, test) for m in MUTATIONS for test in m.tests if any(w in f"{test} {m.changes}" for w in words)]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutation, test in chosen:
            with mutated(tree, mutation):
                code, output = run_alone(tree, test, HANGING if mutation.hangs else PATIENCE)
            found = outcome(mutation, code, output)
            reason = re.findall(r"^(?:E  |FAILED|ERROR).*", output, re.MULTILINE)[:1]
            line = f"{found}: {test} without {' and '.join(repr(old) for _, old, _ in mutation.changes)}"
            print(line, *(f"    {text[:200]}" for text in reason), sep="\n", flush=True)
            wrong += [line] * (not found.startswith("seen to fail"))
    mutations = len({id(mutation) for mutation, _ in chosen})
    print(
        f"\n{mutations} mutations, {len(chosen)} runs of a test, {len(chosen) - len(wrong)} seen to fail",
        *wrong,
        sep="\n",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
