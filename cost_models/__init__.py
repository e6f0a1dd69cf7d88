"""Cost models: functions of plain quantities (FLOPs, bytes, groups, stage times) that know no graph. Seconds, bytes."""
