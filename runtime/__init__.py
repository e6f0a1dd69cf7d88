"""What an emitted program needs while it runs: torch and the standard library only.

This package is copied into every program (as ``program/runtime``); it knows no plan and no graph, only what the emitted
``train.py`` hands it: stages made of blocks, a mesh, and numbers.
"""
