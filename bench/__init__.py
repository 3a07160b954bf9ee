"""Benchmarks that compare Gwen with other engines, and audits of recorded runs."""
