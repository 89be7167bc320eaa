from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["grpo_fast", "grpo_fast.*"]), "grpo_fast.kernels"])
