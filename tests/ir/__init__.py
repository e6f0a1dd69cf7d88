"""Tests of the shared types and their JSON form."""
