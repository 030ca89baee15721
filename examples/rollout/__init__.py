"""Rollouts by another process that computes with the trainer's own bits."""
