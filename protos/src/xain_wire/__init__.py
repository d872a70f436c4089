"""The wire contract of the coordinator: generated protobuf modules and the ndarray codec."""
