"""Rewards: functions of users, verifiers, and the audit that tries them."""
