"""The commands of the terminal that have a file of their own; `planner/cli.py` registers them."""
