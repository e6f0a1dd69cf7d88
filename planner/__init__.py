"""The planner: from a model and a cluster to a plan."""
