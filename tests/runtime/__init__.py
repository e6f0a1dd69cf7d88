"""Tests of the runtime: conversions, state, ZeRO, schedules and whole programs, on gloo groups of small processes."""
