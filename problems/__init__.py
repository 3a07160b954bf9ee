"""Rewards, verifiers, data, tools and environments that users bring."""
