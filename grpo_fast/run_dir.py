"""What lies where in a run's folder."""

CONFIG_FILE = "config.yaml"
CHECKPOINTS_DIR = "checkpoints"
