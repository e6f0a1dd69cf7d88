"""Hardware profiles: units, reader, clusters."""
