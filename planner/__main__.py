"""`python -m planner` is `shardwright`."""

from planner.cli import main

main()
