"""The wire of XAIN 0.6.0, for ever: the names, numbers and types of its own participants."""

import pytest

from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.np import ndarray_pb2

# (field, number, type as FieldDescriptor has it): 5 int32, 9 string, 14 enum.
XAIN_MESSAGES = {
    "RendezvousRequest": [],
    "RendezvousResponse": [("reply", 1, 14)],
    "HeartbeatRequest": [("state", 1, 14), ("round", 2, 5)],
    "HeartbeatResponse": [("state", 1, 14), ("round", 2, 5)],
    "StartTrainingRoundRequest": [],
    "StartTrainingRoundResponse": [("epochs", 1, 5), ("epoch_base", 2, 5)],
    "EndTrainingRoundRequest": [
        ("participant_id", 1, 9),
        ("number_samples", 2, 5),
        ("metrics", 3, 9),
    ],
    "EndTrainingRoundResponse": [],
}
FIRST_NEW_FIELD = 10


def test_package_service_and_methods():
    """The method paths that XAIN's stubs call, all unary."""
    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    assert service.full_name == "xain_proto.fl.Coordinator"
    for name in ("Rendezvous", "Heartbeat", "StartTrainingRound", "EndTrainingRound"):
        method = service.methods_by_name[name]
        assert (method.input_type.name, method.output_type.name) == (
            f"{name}Request",
            f"{name}Response",
        )
        assert not method.client_streaming
        assert not method.server_streaming


@pytest.mark.parametrize("name", XAIN_MESSAGES)
def test_messages(name):
    """Old fields keep number and type; new ones begin at 10."""
    message = pb.DESCRIPTOR.message_types_by_name[name]
    fields = [(field.name, field.number, field.type) for field in message.fields]
    old = [field for field in fields if field[1] < FIRST_NEW_FIELD]
    assert old == XAIN_MESSAGES[name]


def test_enums():
    """Enum values keep their numbers."""
    assert dict(pb.RendezvousReply.items()) == {"ACCEPT": 0, "LATER": 1}
    assert dict(pb.State.items()) == {
        "STANDBY": 0,
        "ROUND": 1,
        "FINISHED": 2,
        "READY": 3,
        "TRAINING": 4,
    }


def test_ndarray():
    """The array message and its package."""
    message = ndarray_pb2.DESCRIPTOR.message_types_by_name["NDArray"]
    assert message.full_name == "xain_proto.np.NDArray"
    assert [(field.name, field.number, field.type) for field in message.fields] == [
        ("ndarray", 1, 12)
    ]


def test_bytes_of_xain_are_read_and_ours_are_read_by_xain():
    """Requests as XAIN's generated code encodes them, byte by byte; and answers whose old fields
    come first, so that a peer which knows no others finds them."""
    heartbeat = pb.HeartbeatRequest.FromString(bytes.fromhex("08 04 10 07"))
    assert (heartbeat.state, heartbeat.round) == (pb.TRAINING, 7)
    end = pb.EndTrainingRoundRequest.FromString(b"\x0a\x04uuid\x10\x2a\x1a\x02[]")
    assert (end.participant_id, end.number_samples, end.metrics) == ("uuid", 42, "[]")
    assert not end.HasField("round")
    answer = pb.StartTrainingRoundResponse(epochs=3, epoch_base=6, round=2)
    assert answer.SerializeToString().startswith(bytes.fromhex("08 03 10 06"))
