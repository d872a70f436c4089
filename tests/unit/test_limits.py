"""The bounds in docs/limits.md are those of the programs, and a test drives each of them over."""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits.md"
UNITS = {"": 1, "bytes": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
CONSTANT = re.compile(r'`([\w.]+):([\w.]+)(?:\["(.+)"\])?`')

# Where a row is driven over its bound, by the row's first two columns.
DRIVEN: Mapping[tuple[str, str], str] = {
    ("gRPC port", "connections on which no member has called"): (
        "integration/test_connection_floods.py"
        "::test_unregistered_connections_of_a_coordinator_are_ended_and_members_kept"
    ),
    ("gRPC port", "calls of one participant"): (
        "integration/test_admission_control.py::test_member_with_too_many_calls_is_asked_to_come_again"
    ),
    ("gRPC port", "calls on one connection of a certificate's holder"): (
        "integration/test_closed_coordinator.py::test_refused_calls_of_a_holder_are_held_back"
    ),
    ("gRPC port", "calls of a certificate's holder in a second"): (
        "integration/test_closed_coordinator.py::test_holder_of_a_certificate_has_a_rate_limit"
    ),
    ("gRPC port", "refusals to a certificate's holder in a second"): (
        "integration/test_closed_coordinator.py::test_refused_calls_of_a_holder_are_held_back"
    ),
    ("gRPC port", "refusals that are held back"): (
        "integration/test_closed_coordinator.py::test_refused_calls_of_a_holder_are_held_back"
    ),
    ("gRPC port", "rows to be predicted, as JSON"): (
        "integration/coordinator/test_predictions.py::test_requests_that_take_long_to_parse_are_refused"
    ),
    ("gRPC port", "calls of unregistered clients"): (
        "integration/test_admission_control.py"
        "::test_silent_calls_of_unregistered_clients_make_room_for_newer_calls"
    ),
    ("gRPC port", "messages of unregistered clients that come at a time"): (
        "integration/test_admission_control.py"
        "::test_slow_requests_of_unregistered_clients_end_when_others_wait_to_be_read"
    ),
    ("gRPC port", "a call before its first message"): (
        "integration/test_admission_control.py"
        "::test_call_without_a_message_ends_with_deadline_exceeded"
    ),
    ("gRPC port", "predictions asked of participants"): (
        "integration/coordinator/test_predictions.py::test_questions_are_bounded"
    ),
    ("gRPC port", "a certificate request"): (
        "unit/coordinator/access/test_control.py::test_broken_requests_are_refused_in_words"
    ),
    ("gRPC port", "valid certificates and tokens of a name"): (
        "unit/coordinator/access/test_decider.py::test_no_name_fills_the_audit_log"
    ),
    ("audit log", "refused identities in a minute"): (
        "unit/coordinator/access/test_refusals.py::test_many_hosts_share_some_lines"
    ),
    ("weights port", "connections"): (
        "integration/test_weights_port.py::test_burst_of_connections_stays_within_the_limit"
    ),
    ("weights port", "a head until it is whole"): (
        "integration/test_weights_port.py::test_sender_of_single_bytes_ends"
    ),
    ("weights port", "a body without progress"): (
        "integration/test_weights_port.py::test_stalled_transfer_ends"
    ),
    ("HTTP face", "connections"): (
        "integration/coordinator/test_http_bounds.py::test_half_requests_keep_no_client_out"
    ),
    ("HTTP face", "handshakes of TLS under way"): (
        "integration/coordinator/test_http_access.py::test_silent_handshakes_have_a_bound"
    ),
    ("HTTP face", "a head until it is whole"): (
        "integration/coordinator/test_http_bounds.py"
        "::test_head_that_does_not_come_ends_its_connection"
    ),
    ("HTTP face", "a head"): (
        "integration/coordinator/test_http_bounds.py::test_head_over_the_bound_is_refused"
    ),
    ("HTTP face", "bodies in flight, in `[http] max_body_bytes`"): (
        "integration/test_http_flood.py::test_floods_leave_memory_below_200_mib_and_others_served"
    ),
    ("HTTP face", "rows of a body"): (
        "integration/coordinator/test_http_bounds.py"
        "::test_body_with_too_many_rows_or_of_another_path_is_refused"
    ),
    ("HTTP face", "a body without rows"): (
        "integration/coordinator/test_http_bounds.py"
        "::test_body_with_too_many_rows_or_of_another_path_is_refused"
    ),
    ("HTTP face", "downloads of models"): (
        "integration/coordinator/test_http_bounds.py"
        "::test_downloads_that_are_not_read_leave_connections_to_others"
    ),
    ("HTTP face", "readers of events"): (
        "integration/coordinator/test_http_bounds.py"
        "::test_readers_of_events_leave_connections_to_others"
    ),
    ("Membership", "connections on which no member has called"): (
        "integration/test_connection_floods.py"
        "::test_unregistered_connections_of_a_membership_service_are_ended_and_members_kept"
    ),
    ("Membership", "members of all groups"): (
        "contract/discovery/test_membership_service.py::test_members_are_bounded"
    ),
    ("Membership", "groups of a certificate's holder"): (
        "integration/test_closed_coordinator.py"
        "::test_member_of_messaging_takes_no_slot_of_another_and_joins_few_groups"
    ),
    ("Membership", "barriers at which a member waits"): (
        "contract/discovery/test_barriers.py::test_barriers_of_a_member_are_bounded"
    ),
    ("gRPC driver", "connections without a packet"): (
        "integration/test_connection_floods.py"
        "::test_unregistered_connections_of_a_driver_are_ended_and_peers_kept"
    ),
    ("gRPC driver", "streams of peers"): (
        "contract/drivers/test_grpc.py"
        "::test_a_stream_beyond_the_bound_is_served_when_another_has_ended"
    ),
    ("gRPC driver", "a packet"): (
        "contract/drivers/test_connections.py::test_a_stream_that_carries_no_packets_is_ended"
    ),
    ("gRPC driver", "packets up to 16 MiB that are put together"): (
        "contract/drivers/test_connections.py::test_packets_that_are_put_together_have_a_bound"
    ),
    ("gRPC driver", "larger packets that are put together"): (
        "contract/drivers/test_connections.py::test_stalled_large_packet_holds_up_no_small_one"
    ),
    ("ZeroMQ driver", "packets of a peer that nobody has taken"): (
        "contract/drivers/test_zeromq.py::test_fast_sender_over_zeromq_waits"
    ),
    ("parameter server", "connections of a server"): (
        "integration/parameters/test_transport.py::test_connections_beyond_the_limit_are_closed"
    ),
    ("parameter server", "a connection without a Hello"): (
        "integration/parameters/test_transport.py"
        "::test_connections_that_say_nothing_keep_no_worker_out"
    ),
    ("parameter server", "a head of a message"): (
        "integration/parameters/test_transport.py"
        "::test_malformed_frames_end_their_connection_and_nothing_else"
    ),
    ("parameter server", "the body of a request to a handler, and an answer"): (
        "integration/parameters/test_requests.py::test_requests_are_checked_before_they_are_sent"
    ),
    ("parameter server", "requests that wait for a member's handler"): (
        "unit/parameters/test_handlers.py"
        "::test_requests_beyond_the_bound_are_refused_at_once_and_the_others_done"
    ),
    **{
        ("scheduler", what): (
            "unit/parameters/test_relay.py::test_requests_of_a_sender_and_of_all_are_bounded"
        )
        for what in ("requests to handlers that wait for answers", "the same, of one worker")
    },
    ("scheduler", "answers that their senders have not taken yet"): (
        "unit/parameters/test_relay.py::test_replies_that_their_sender_does_not_take_are_bounded"
    ),
    **{
        ("scheduler", what): (
            "integration/parameters/test_table_flood.py"
            "::test_declarations_over_the_bounds_harm_no_push_and_no_replica"
        )
        for what in (
            "the name of a table",
            "the declaration of a table",
            "new tables at once",
            "new tables in a second after that",
        )
    },
    ("scheduler", "tables"): (
        "unit/parameters/test_table_bounds.py::test_as_many_tables_as_there_may_be_fit_into_a_view"
    ),
    ("scheduler", "jobs of a group"): (
        "unit/parameters/test_scheduler_decider.py::test_number_of_jobs_is_bounded"
    ),
    **{
        ("scheduler", what): (
            "unit/parameters/test_parts.py::test_number_of_workers_and_of_data_of_a_job_is_bounded"
        )
        for what in ("workers of a job", "data of a job, by name")
    },
    **{
        ("model file", what): (
            "unit/coordinator/test_model_files.py"
            "::test_file_over_a_bound_is_refused_in_one_line_before_it_is_read"
        )
        for what in (
            "lists and objects of JSON in each other",
            "an archive unpacked, to its size, beyond 64 MiB",
            "the schema of a `.skops`",
        )
    },
    ("model file", "JSON"): (
        "unit/coordinator/test_model_files.py::test_json_file_over_the_bound_is_not_read"
    ),
}


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    told = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in told[1:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}: {row[1]}")
def test_bound_is_told_as_the_program_has_it(row):
    number, _, unit = row[2].partition(" ")
    found = CONSTANT.fullmatch(row[3])
    assert found is not None, row[3]
    module, name, key = found.groups()
    if not module.startswith("xain_"):
        module = f"xain_coordinator.{module}"
    value = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    if key is not None:
        value = value[key]
    assert value == int(number) * UNITS[unit]


def test_each_bound_has_a_test_that_drives_it_over():
    assert {(row[0], row[1]) for row in rows()} == DRIVEN.keys()
    for where in set(DRIVEN.values()):
        path, _, name = where.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), where
