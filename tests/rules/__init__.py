"""Tests of the sharding rules."""
