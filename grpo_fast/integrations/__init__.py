"""Adapters that run other trainers on our head and losses, each tested against the real library.

An adapter raises ImportError where its host is missing, or of a version that it does not know. `unpatch`
undoes `patch`.
"""
