"""Proof that operators and rules mean what they mean on one device: `python -m shardwise verify`."""
