"""Rewards: users' functions, verifiers, and the audit that tests both."""
