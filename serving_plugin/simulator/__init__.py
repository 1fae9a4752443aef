"""Simulation of a cluster: cost models of what a step takes. Imports neither vllm, torch nor numpy."""
