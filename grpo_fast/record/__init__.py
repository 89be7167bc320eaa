"""What a run writes down and keeps: logs, checkpoints, alerts, the display and the report."""
