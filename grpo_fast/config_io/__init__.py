"""Configuration files in and out."""

from grpo_fast.config_io.errors import ConfigError, Problem
from grpo_fast.config_io.load import check_tree, config_path, dump_config, load_config

__all__ = ["ConfigError", "Problem", "check_tree", "config_path", "dump_config", "load_config"]
