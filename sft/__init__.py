"""Supervised fine-tuning: conversations, and the steps and evaluations made of them."""
