"""Configurations of TRL, Axolotl and NeMo-RL in our terms: tables of names, and the account of each key."""
