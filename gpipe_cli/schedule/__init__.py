"""Schedules as data: which worker runs which action in which order. No torch, no threads."""
