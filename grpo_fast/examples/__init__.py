"""Whole files to copy: one for each trainer that our head and losses go into."""
