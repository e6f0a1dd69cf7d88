"""Cost models: kernels, collectives, memory, pipeline schedules."""
