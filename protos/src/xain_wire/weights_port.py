"""Names of the coordinator's weights port, which carries weights over HTTP/1.1 past gRPC.

A URL of the port without a host, such as http://:41000/.weights/..., means the host under which the
participant reaches the coordinator's gRPC port.
"""

# No name of an S3 bucket begins with a dot, so this prefix tells the port's URLs from S3's.
PATH = "/.weights/"
# Request header of PUT and HEAD: xxh3-128 of the whole object, in hex.
DIGEST_HEADER = "Xain-Digest"
# Answer to HEAD at an upload's URL: bytes of the object that the coordinator has.
OFFSET_HEADER = "Xain-Offset"
# Answer to PUT: the key of the stored object, to be handed in with EndTrainingRound.
KEY_HEADER = "Xain-Key"
