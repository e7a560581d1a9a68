"""The wire: code generated from protos/muster/v1 (`make protos`)."""
