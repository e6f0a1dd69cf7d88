"""Predictions against published, measured training runs.

``rows`` reads a table of runs, ``jobs`` says what each ran, ``prepare`` traces, places and counts it, ``predict`` prices it
with the one evaluator, ``score`` compares, ``report`` and ``picture`` show.
"""
