"""A store in a bucket of S3."""
