"""Keys and constant texts of the calls between participants and their coordinator."""

# Metadata: name of a participant, stable across reconnects.
PARTICIPANT_ID_KEY = "xain-participant-id"
# Metadata: tells two processes with one participant id apart: random, or kept by a state directory.
INSTANCE_ID_KEY = "xain-instance-id"
# Metadata: time limit of the call in milliseconds, by which a coordinator tells how long it waited.
TIMEOUT_KEY = "xain-timeout-ms"

# google.rpc.ErrorInfo.domain of the reasons in fl/refusals.proto.
ERROR_DOMAIN = "xain.coordinator"

# HeartbeatResponse.cause of a session that has its result.
COMPLETED = "completed"
